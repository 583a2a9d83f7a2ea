"""`python -m trainer` and `torchrun -m trainer`: the verb `train`."""

from trainer.cli import run
from trainer.train import describe, main

if __name__ == "__main__":
    run(main, describe, has_json=False)
