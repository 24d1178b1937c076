"""Starts the server with an engine that fails on demand: `python tests/serve_faulty.py ARGS`.

With --fake that is the fake engine, else the real exllamav3 on the CPU, as serve_cpu.py has it.

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


class FaultyExl3Backend(engine.Exl3Backend):
    """The real exllamav3 with the same faults. A job's word is looked for once, on submit."""

    def submit(self, job):
        prompt = self.decode(job.params.prompt_ids)
        if "FAIL-ON-SUBMIT" in prompt:
            raise ValueError("planted on submit")
        super().submit(job)
        words = ("IN-PREFILL", "IN-DECODE", "ALONE")
        job.fault = next((word for word in words if f"FAIL-{word}" in prompt), "")

    def iterate(self):
        for handle in (*self.generator.active_jobs, *self.generator.pending_jobs):
            job = handle.identifier
            if job.fault == "IN-PREFILL":
                raise RuntimeError("planted in prefill")
            if job.fault == "IN-DECODE" and job.n_decoded >= 4:
                raise RuntimeError("planted in decode")
        updates = super().iterate()
        for update in updates:
            if update.job.fault == "ALONE" and update.job.n_decoded >= 4 and update.end is None:
                update.end, update.error = engine.EndKind.FAILED, "planted for this job"
                self.cancel(update.job)
        return updates


class FaultyJob(engine.Job):
    """With room for a word."""

    fault = ""


def slow_load(*args):
    time.sleep(float(os.environ.get("FAULTY_LOAD_S", 0)))
    if "FAULTY_LOAD" in os.environ:
        raise engine.LoadError(os.environ["FAULTY_LOAD"])
    return load(*args)


if __name__ == "__main__":
    if "--fake" not in sys.argv:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import cpu_exllamav3

        cpu_exllamav3.torch.set_num_threads(1)
        cpu_exllamav3.install()
        engine.Job, engine.Exl3Backend = FaultyJob, FaultyExl3Backend
    engine.FakeBackend = FaultyBackend
    engine.load = slow_load
    sys.exit(exl3_serve.main(sys.argv[1:]))
