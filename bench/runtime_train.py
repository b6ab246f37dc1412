"""What each rank of bench.runtime runs: the example's GPT by the launcher's plan, with overlap or without.

arachne run plan.json -- -m bench.runtime_train LOG STEPS on|off WIDTH
"""

import itertools
import sys
import time
from pathlib import Path

import msgspec

import arachne_runtime as arachne
from examples.gpt import GPT, Config, StandardLibrary, adamw, next_byte_loss
from launch.demo.run import LoggedStep


def main() -> None:
    log, steps, overlap = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "on"
    config = Config(width=int(sys.argv[4]))
    with arachne.Session(trace=log.with_suffix(".trace")) as session:
        engine = session.engine(lambda: GPT(config), optimizer=adamw, loss=next_byte_loss, overlap=overlap)
        batches = session.batches(StandardLibrary(Config.sequence), session.plan.global_batch)
        told, last = [], time.perf_counter()
        for batch in itertools.islice(batches, steps):
            report = engine.step(batch)
            now = time.perf_counter()
            told.append(LoggedStep(report.step, report.loss, now - last))
            last = now
        if session.rank == 0:
            log.write_bytes(b"\n".join(msgspec.json.encode(step) for step in told) + b"\n")


if __name__ == "__main__":
    main()
