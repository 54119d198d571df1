"""`kvstrata demo`: one chunk's whole life, with real processes and real numbers.

A control plane and two nodes are started on loopback. A small decoder holds conversations on
node A whose KV exceeds its host tier, is killed and started again, and goes on; then a transfer
scheduled by REST takes one conversation to node B. Every answer is computed a second time by an
engine without offload, and the logits must be equal bit for bit.
"""

import os

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """The command; its exit status is 0 only if every check holds."""
    # Read by BLAS when numpy is loaded, here and in the engines. Its products are small, so a
    # second thread mostly waits for the first: on two busy cores a prompt of 800 tokens took 10 s
    # instead of 1.2 s.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from kvstrata_adapters.demo.command import run

    return run(argv)
