"""Train the ResNet or the ViT on pictures of shapes, by a plan.

arachne run plan.json -- examples/train_shapes.py --model resnet --global-batch 64
python examples/train_shapes.py --model vit --global-batch 64          # one process, the whole model
"""

import argparse
import itertools

import resnet
import vit
from shapes import Shapes

import arachne_runtime as arachne

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("resnet", "vit"), default="resnet")
parser.add_argument("--global-batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()

work = {"resnet": resnet.workload, "vit": vit.workload}[arguments.model]
with arachne.Session() as session:
    engine = session.engine(work.model, optimizer=work.optimizer, loss=work.loss)
    batches = session.batches(Shapes(), global_batch=arguments.global_batch, epochs=10, seed=0)
    for batch in itertools.islice(batches, arguments.steps):
        report = engine.step(batch)
        session.print(f"step {report.step:4d}  loss {report.loss:.4f}  {report.seconds:.3f} s")
