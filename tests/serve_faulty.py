"""Starts the server with a fake engine that fails on demand: `python tests/serve_faulty.py ARGS`.

A prompt that holds one of these words makes the engine fail, once for each such request:

    FAIL-ON-SUBMIT    the engine refuses the job
    FAIL-IN-PREFILL   `iterate` raises, which is the generator failing, while it takes the prompt
    FAIL-IN-DECODE    likewise at the fifth token
    FAIL-ALONE        this job alone fails at the fifth token

Environment: FAULTY_LOAD_S seconds that loading takes, FAULTY_LOAD an error that ends it,
FAULTY_REBUILD an error that every restart of the generator ends in.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import engine
import exl3_serve

load = engine.load


class FaultyBackend(engine.FakeBackend):
    """The fake with the faults that the prompts ask for."""

    def submit(self, job):
        if self.asks(job, b"FAIL-ON-SUBMIT"):
            raise ValueError("planted on submit")
        super().submit(job)

    def asks(self, job, word):
        return word in bytes(i for i in job.params.prompt_ids if i < 256)

    def iterate(self):
        for job in self.runs:
            last = job.last or engine.Update(job)
            if not last.n_decoded and (last.progress or 0) < len(job.params.prompt_ids):
                if self.asks(job, b"FAIL-IN-PREFILL"):
                    raise RuntimeError("planted in prefill")
            elif last.n_decoded == 4 and self.asks(job, b"FAIL-IN-DECODE"):
                raise RuntimeError("planted in decode")
            elif last.n_decoded == 4 and self.asks(job, b"FAIL-ALONE"):
                job.handle.append({"error": "planted for this job"})
        return super().iterate()

    def rebuild(self):
        if "FAULTY_REBUILD" in os.environ:
            raise RuntimeError(os.environ["FAULTY_REBUILD"])
        super().rebuild()


def slow_load(*args):
    time.sleep(float(os.environ.get("FAULTY_LOAD_S", 0)))
    if "FAULTY_LOAD" in os.environ:
        raise engine.LoadError(os.environ["FAULTY_LOAD"])
    return load(*args)


if __name__ == "__main__":
    engine.FakeBackend = FaultyBackend
    engine.load = slow_load
    sys.exit(exl3_serve.main(sys.argv[1:]))
