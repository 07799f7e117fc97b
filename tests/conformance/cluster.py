"""A real coordinator and real servers as processes, the model that the tests train, and deadlines."""

import json
import os
import re
import subprocess
import tempfile
import threading
import time
from array import array
from pathlib import Path

from flambeau.v1 import coordinator_pb2 as c
from flambeau.v1 import types_pb2 as t

import order
from wire import Coordinator, from_bytes

PROGRAM = os.environ.get("FLAMBEAU_PROGRAM", "target/debug/flambeau")
# Deadline of what is waited for; generous, for no test is decided by speed.
DEADLINE = 60


def job(mode, samples, epochs=1, batch=10, lease=10.0, checkpoint="enabled = false", staleness=None):
    staleness = "" if staleness is None else f"staleness = {staleness}"
    # The weights count the pushes.
    correction = "correction = { enabled = false }"
    return f"""
name = "conformance"
seed = 1
epochs = {epochs}
batch_size = {batch}
[optimizer]
name = "sgd"
learning_rate = 1.0
[strategy]
mode = "{mode}"
{staleness}
{correction}
[cluster]
lease_seconds = {lease}
[checkpoint]
{checkpoint}
"""


class Process:
    """A process of the cluster, and its log."""

    def __init__(self, arguments, log):
        self.log = log
        with open(log, "w") as file:
            # It ends with its input, and so with this process, however that ends.
            self.child = subprocess.Popen(
                [PROGRAM, *arguments, "--exit-with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, text=True)
        self.line, self.killed = None, False
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        eventually(lambda: self.line is not None or self.child.poll() is not None, f"{arguments} is ready")
        found = re.search(r"listening on ([^ ,]+)", self.line or "")
        if not found:
            self.end()
            raise AssertionError(f"{arguments} did not start: {self.line}\n{self.tail()}")
        self.address = found[1]

    def _read(self):
        for line in self.child.stdout:
            self.line = self.line or line
        self.line = self.line or ""

    def tail(self):
        return Path(self.log).read_text()[-3000:]

    def kill(self):
        """SIGKILL."""
        self.killed = True
        self.child.kill()
        self.child.wait(DEADLINE)

    def end(self):
        if self.child.poll() is None:
            self.kill()
        self.child.stdin.close()
        self.child.stdout.close()


class Cluster:
    """A coordinator and two servers. Ends them whatever happens."""

    def __init__(self, job_toml, workers):
        self.folder = tempfile.TemporaryDirectory(prefix="flambeau-conformance-")
        self.processes = []
        folder = Path(self.folder.name)
        (folder / "job.toml").write_text(job_toml)
        self.run = folder / "run"
        try:
            self.coordinator = self.start(
                "coordinator", str(folder / "job.toml"), "--listen", "127.0.0.1:0", "--ps", "2",
                "--workers", str(workers), "--run-dir", str(self.run))
            self.address = self.coordinator.address
            self.calls = Coordinator(self.address)
            self.ps = []
            for number in range(2):
                self.ps.append(self.server(number))
                # So that the one that came first has index 0.
                eventually(lambda: len(self.servers()) == number + 1, "the server has registered")
        except BaseException:
            self.end()
            raise

    def start(self, *arguments):
        log = Path(self.folder.name) / f"log-{len(self.processes)}"
        self.processes.append(Process(arguments, log))
        return self.processes[-1]

    def server(self, number):
        return self.start("ps-server", "--coordinator", self.address, "--listen", "127.0.0.1:0",
                          "--identity", f"server-{number}")

    def servers(self):
        return [task for task in self.status().tasks if task.alive and task.task.task.role == t.ROLE_PS]

    def status(self):
        return self.calls.call("GetStatus", c.StatusRequest())

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            for process in self.processes:
                print(f"--- {' '.join(process.child.args[1:3])}\n{process.tail()}")
        self.end()

    def end(self):
        for process in self.processes:
            process.end()
        if hasattr(self, "calls"):
            self.calls.channel.close()
        self.folder.cleanup()

    def finish(self):
        """Waits until all processes that were not killed have ended well. Returns the summary."""
        for process in self.processes:
            code = process.child.wait(DEADLINE)
            if code != 0 and not process.killed:
                raise AssertionError(f"{process.child.args} ended with code {code}\n{process.tail()}")
        return json.loads((self.run / "summary.json").read_text())


    def model(self):
        """Returns the final weights, as the last evaluation has saved them: shape and values of each variable."""
        content = (self.run / "model.safetensors").read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8:8 + length]), content[8 + length:]
        return {name: (entry["shape"], from_bytes(data[slice(*entry["data_offsets"])]))
                for name, entry in header.items()}


def eventually(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come to pass within {DEADLINE} s that {what}")
        time.sleep(0.02)


def beside(*functions):
    """Runs functions at the same time, and returns what each returns; fails with the first that fails."""
    results, errors = [None] * len(functions), []

    def run(index, function):
        try:
            results[index] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * DEADLINE
    while any(thread.is_alive() for thread in threads) and not errors:
        if time.monotonic() > deadline:
            raise TimeoutError("workers did not end in time")
        time.sleep(0.02)
    if errors:
        raise errors[0]
    return results


class Counting:
    """A model that counts. Each gradient is one, so with plain SGD at a learning rate of 1 the weights fall by
    one a push; in `visits` only the elements of the samples of the batch do."""

    def __init__(self, samples, batch=10, seed=1):
        self.training_samples, self.evaluation_samples = samples, 7
        self.batch, self.seed = batch, seed
        # Sorted by name. "counts" has several blocks, the last one shorter.
        self.variables = [("bias", [3]), ("counts", [2, 20_000]), ("scale", []), ("visits", [samples])]
        self.ones = [array("f", [1.0]) * self.elements(v) for v in range(3)]
        self.orders = {}
        self.final = None

    def elements(self, variable):
        elements = 1
        for length in self.variables[variable][1]:
            elements *= length
        return elements

    def initial(self):
        counts = array("f", (i % 7 + 0.5 for i in range(self.elements(1))))
        return [array("f", [0.5, -1.0, 2.0]), counts, array("f", [3.0]), array("f", bytes(4 * self.elements(3)))]

    def gradients(self, _values, split, start, end):
        if split.data_epoch not in self.orders:
            self.orders[split.data_epoch] = order.order(self.seed, split.data_epoch, self.training_samples)
        visits = array("f", bytes(4 * self.elements(3)))
        for sample in self.orders[split.data_epoch][start:end]:
            visits[sample] = 1.0
        return [*self.ones, visits]

    def loss(self, values):
        return values[0][0]
