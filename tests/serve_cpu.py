"""Starts the server with the real exllamav3 on the CPU: `python tests/serve_cpu.py ARGUMENTS`.

The arguments are those of `exl3_serve.py`. One torch thread: the models are too small to share,
and tests run in parallel.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


def main():
    import cpu_exllamav3

    cpu_exllamav3.torch.set_num_threads(1)
    cpu_exllamav3.install()

    import exl3_serve

    return exl3_serve.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
