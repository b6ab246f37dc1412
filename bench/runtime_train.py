"""What each rank of bench.runtime runs: the example's GPT by the launcher's plan, with overlap or without.

arachne run plan.json -- -m bench.runtime_train LOG STEPS on|off
"""

import itertools
import sys
import time
from pathlib import Path

import msgspec

import arachne_runtime as arachne
from arachne_runtime.engine import Engine, Recipe
from arachne_runtime.measure.recorder import Recorder
from arachne_runtime.model import ModelParts
from examples.gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss
from launch.demo.run import LoggedStep


def main() -> None:
    log, steps, overlap = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "on"
    with arachne.Session() as session:
        recorder = Recorder(log.with_suffix(".trace"), rank=session.rank, plan=session.plan)
        recipe = Recipe(optimizer=adamw, loss=next_byte_loss)
        engine = Engine(
            session.plan, ModelParts.of(lambda: GPT(Config())), recipe, recorder=recorder, overlap=overlap
        )
        session._engine = engine  # what batches are for; the switch is no argument of session.engine
        session._engines.append(engine)
        batches = session.batches(StandardLibrary(Config.sequence), session.plan.global_batch)
        told, last = [], time.perf_counter()
        for batch in itertools.islice(batches, steps):
            report = engine.step(batch)
            now = time.perf_counter()
            told.append(LoggedStep(report.step, report.loss, now - last))
            last = now
        recorder.close()
        if session.rank == 0:
            log.write_bytes(b"\n".join(msgspec.json.encode(step) for step in told) + b"\n")


if __name__ == "__main__":
    main()
