"""A worker of Flambeau in Python, written from proto/ alone with generated stubs.

It trains whatever model it is given: values and gradients are arrays of floats, one for each variable.
"""

import collections
import hashlib
import json
import os
import struct
import threading
import time
import tomllib
from array import array

import grpc

from flambeau.v1 import coordinator_pb2 as c
from flambeau.v1 import parameter_server_pb2 as p
from flambeau.v1 import types_pb2 as t

from wire import CALL_SECONDS, PATIENCE_SECONDS
from wire import Broken, Coordinator, Refused, Stream, block_id, from_bytes, key, to_bytes

PROTOCOL_VERSION = 1
# Payload bytes of one message: few, so that steps are cut into several.
MESSAGE_BYTES = 100_000


class Shard:
    """A worker's messages to a shard, and the shard's answers. Outlives streams and servers."""

    def __init__(self, number):
        self.number = number
        self.stream = None
        # By sequence, in the order of sending; those that were not answered are sent again.
        self.unanswered = collections.OrderedDict()
        # Clocks of the acknowledged pushes of each block, in order, and how many of them are lost.
        self.acknowledged = collections.defaultdict(list)
        self.lost = collections.Counter()
        # ShardSource.epoch of the values that were pushed to.
        self.source = None
        # The epoch of the shard map in which this shard is settled.
        self.settled = 0

    def note(self, push, acknowledged):
        if acknowledged.level == p.ACKNOWLEDGEMENT_LEVEL_APPLIED:
            for version in acknowledged.blocks:
                self.acknowledged[key(version.block)].append(push.origin.clock)

    def newly_lost(self, outcomes):
        """Compares what was acknowledged with what the blocks have. Returns the clocks of the lost updates."""
        clocks = []
        for outcome in outcomes:
            block = key(outcome.version.block)
            pushes = self.acknowledged[block]
            missing = max(0, len(pushes) - outcome.taken)
            new = max(0, missing - self.lost[block])
            if new:
                self.lost[block] = missing
                clocks += pushes[len(pushes) - new:]
        return clocks


class Worker:
    """A member of the cluster in one of its lives (generations)."""

    def __init__(self, address, identity, model, coordinator=None):
        self.model = model
        self.coordinator = coordinator or Coordinator(address)
        reply = self.coordinator.call("Register", c.RegisterRequest(
            protocol_version=PROTOCOL_VERSION, role=t.ROLE_WORKER, identity=identity))
        self.job, self.task, self.view = reply.job, reply.task, reply.view
        self.settings = tomllib.loads(reply.job_toml)
        self.lease_seconds = reply.lease_milliseconds / 1000
        self.sequence, self.clock, self.newest_epoch = 0, 0, 0
        self.numbers = threading.Lock()
        self.known, self.shards, self.map = {}, [], None
        self.reported_lost, self.pushes, self.max_lead = 0, 0, 0
        self.stopped = threading.Event()
        self.failure = None
        self.heart = threading.Thread(target=self.heartbeats, daemon=True)
        self.heart.start()

    def origin(self, clock=None, epoch=0):
        with self.numbers:
            self.sequence += 1
            return t.Origin(job=self.job, task=self.task, epoch=epoch, sequence=self.sequence,
                            clock=self.clock if clock is None else clock)

    def heartbeats(self):
        while not self.stopped.wait(self.lease_seconds / 3):
            try:
                reply = self.coordinator.call("Heartbeat", c.HeartbeatRequest(origin=self.origin()))
            except Refused as refused:
                self.failure = refused
                return
            except (grpc.RpcError, ValueError):
                return
            self.newest_epoch = max(self.newest_epoch, reply.epoch)

    # Registration and initial values.

    def start(self):
        variables = [t.Variable(name=name, shape=shape) for name, shape in self.model.variables]
        while True:
            reply = self.coordinator.call("RegisterVariables", c.RegisterVariablesRequest(
                origin=self.origin(), variables=variables,
                training_samples=self.model.training_samples,
                evaluation_samples=self.model.evaluation_samples))
            if reply.initialization != c.INITIALIZATION_PENDING:
                break
        self.view = reply.view
        self.take_map(reply.shard_map)
        self.values = [array("f", bytes(4 * self.model.elements(v))) for v in range(len(variables))]
        if reply.initialization == c.INITIALIZATION_YOURS:
            self.initialize()

    def initialize(self):
        initial = self.model.initial()
        sent = []
        for shard, blocks in self.messages():
            parts = [p.BlockPayload(block=block_id(block), payload=self.payload(initial, block))
                     for block in blocks]
            message = p.Initialize(origin=self.origin(clock=0), blocks=parts)
            sent.append((shard, self.post(shard, initialize=message)))
        for shard, sequence in sent:
            self.answer(shard, sequence)
        self.coordinator.call("FinishInitialization",
                              c.FinishInitializationRequest(origin=self.origin()))

    # Blocks.

    def take_map(self, shard_map):
        self.map = shard_map
        self.newest_epoch = max(self.newest_epoch, shard_map.epoch)
        if not self.shards:
            self.shards = [Shard(number) for number in range(len(shard_map.shard_addresses))]

    def range(self, block):
        size = self.map.block_elements
        start = block[1] * size
        return start, min(start + size, self.model.elements(block[0]))

    def payload(self, values, block):
        start, end = self.range(block)
        return t.Payload(dtype=t.DTYPE_F32, dense=to_bytes(values[block[0]][start:end]))

    def messages(self):
        """Returns each shard's blocks, cut into messages."""
        parts = {}
        for variable, placed in enumerate(self.map.variables):
            for index, shard in enumerate(placed.shards):
                parts.setdefault(shard, [[]])
                start, end = self.range((variable, index))
                size = sum(4 * (e - s) for s, e in map(self.range, parts[shard][-1]))
                if parts[shard][-1] and size + 4 * (end - start) > MESSAGE_BYTES:
                    parts[shard].append([])
                parts[shard][-1].append((variable, index))
        return [(self.shards[shard], blocks) for shard, all in sorted(parts.items()) for blocks in all]

    # Sessions.

    def post(self, shard, **kind):
        """Notes a message as unanswered and sends it, if there is a stream."""
        (message,) = kind.values()
        shard.unanswered[message.origin.sequence] = kind
        if shard.stream is not None:
            self.transmit(shard, kind)
        return message.origin.sequence

    def transmit(self, shard, kind):
        """Sends a message as it is, in the epoch of the stream."""
        (message,) = kind.values()
        message.origin.epoch = shard.stream.welcome.epoch
        shard.stream.send(**kind)

    def answer(self, shard, sequence):
        """Returns the answer to a message. Opens streams again, as often as they break."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError(f"shard {shard.number} does not answer message {sequence}")
            try:
                answer = self.take_answer(shard, deadline)
            except Broken:
                self.close(shard)
                time.sleep(0.05)
                continue
            found, value = answer
            if found == sequence:
                return value

    def take_answer(self, shard, deadline):
        if shard.stream is None:
            self.open(shard)
        timer = threading.Timer(max(0.1, deadline - time.monotonic()), shard.stream.call.cancel)
        timer.start()
        try:
            message = shard.stream.receive()
        finally:
            timer.cancel()
        kind = message.WhichOneof("kind")
        value = getattr(message, kind)
        if kind == "waiting":
            return None, None
        if kind == "refused":
            if value.reason == t.REASON_NOT_INITIALIZED:
                time.sleep(0.02)
                self.transmit(shard, shard.unanswered[value.sequence])
                return None, None
            if value.reason == t.REASON_STALE_EPOCH:
                raise Broken(value.message)
            shard.unanswered.pop(value.sequence, None)
            raise Refused(value.reason, value.code, value.message)
        sequence = value.sequence if kind == "acknowledged" else value.request
        sent = shard.unanswered.pop(sequence, {})
        if "push" in sent:
            shard.note(sent["push"], value)
        return sequence, value

    def open(self, shard):
        """Fetches the map and opens a stream. After a restore finds out what is lost, and reports it. Then sends
        again what was not answered, in order, under its old numbers."""
        self.take_map(self.coordinator.call("GetShardMap", c.ShardMapRequest()))
        address = self.map.shard_addresses[shard.number]
        if not address:
            raise Broken("the shard has no server at present")
        source = self.map.sources[shard.number].epoch
        hello = p.Hello(protocol_version=PROTOCOL_VERSION, view=self.view,
                        origin=self.origin(epoch=self.map.epoch))
        try:
            stream = Stream(address, hello)
        except Refused as refused:
            if refused.reason == t.REASON_STALE_EPOCH:
                raise Broken(refused.message) from None
            raise
        if stream.welcome.shard != shard.number or stream.welcome.epoch != self.map.epoch:
            stream.close()
            raise Broken("it is not the server of this map")
        shard.stream = stream
        if shard.source not in (None, source):
            self.account_for_losses(shard)
        shard.source = source
        shard.settled = self.map.epoch
        for kind in list(shard.unanswered.values()):
            self.transmit(shard, kind)

    def account_for_losses(self, shard):
        blocks = [block_id(block) for block in sorted(shard.acknowledged)]
        if not blocks:
            return
        ask = p.AskOutcome(origin=self.origin(epoch=self.map.epoch), blocks=blocks)
        answer = shard.stream.ask(ask_outcome=ask)
        if answer.WhichOneof("kind") != "outcome":
            raise Broken(f"no outcome came: {answer}")
        clocks = shard.newly_lost(answer.outcome.blocks)
        if clocks:
            self.reported_lost += len(clocks)
            self.coordinator.call("Report", c.ReportRequest(
                origin=self.origin(epoch=self.map.epoch),
                lost=c.LostReport(shard=shard.number, updates=len(clocks),
                                  first_step=min(clocks), last_step=max(clocks))))

    def close(self, shard):
        if shard.stream is not None:
            shard.stream.close()
            shard.stream = None

    def settle(self):
        """Moves all sessions to the newest map, and reports what was lost by that."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.take_map(self.coordinator.call("GetShardMap", c.ShardMapRequest()))
            behind = [shard for shard in self.shards if shard.settled < self.map.epoch]
            if not behind:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the sessions do not settle")
            for shard in behind:
                self.close(shard)
                try:
                    self.open(shard)
                except Broken:
                    time.sleep(0.05)

    # Training.

    def pull(self, clock, view=0):
        """Brings the worker's values up to date. Returns the lowest epoch of the answers."""
        sent, epochs = [], []
        for shard, blocks in self.messages():
            known = [self.known.get(block, t.BlockVersion(block=block_id(block))) for block in blocks]
            wanted = [t.WantedBlock(block=held.block, epoch=held.epoch, version=held.version) for held in known]
            message = p.Pull(origin=self.origin(clock), blocks=wanted, dtype=t.DTYPE_F32, view=view)
            sent.append((shard, self.post(shard, pull=message)))
        for shard, sequence in sent:
            weights = self.answer(shard, sequence)
            epochs.append(weights.epoch)
            self.max_lead = max(self.max_lead, clock - weights.min_clock)
            for part in weights.blocks:
                block = key(part.version.block)
                start, end = self.range(block)
                self.values[block[0]][start:end] = from_bytes(part.payload.dense)
                self.known[block] = part.version
        return min(epochs)

    def push(self, clock, gradients):
        """Pushes a step's gradients. Returns the receipts of the shards, in sync mode."""
        sent, receipts = [], []
        for shard, blocks in self.messages():
            parts = [p.Gradient(block=block_id(block), payload=self.payload(gradients, block),
                                based_on_version=self.known[block].version) for block in blocks]
            message = p.Push(origin=self.origin(clock), gradients=parts)
            sent.append((shard, self.post(shard, push=message)))
        self.pushes += 1
        for shard, sequence in sent:
            acknowledged = self.answer(shard, sequence)
            if acknowledged.receipt:
                receipts.append(c.ShardReceipt(shard=shard.number, receipt=acknowledged.receipt))
        return receipts

    def finish(self, split, position, samples, loss, receipts=(), **more):
        """Reports a finished step. Moves to the newest map first where the coordinator demands it."""
        request = c.FinishStepRequest(
            origin=self.origin(), split=split.id, position=position, steps=1, samples=samples,
            loss_sum=loss, receipts=receipts, **more)
        while True:
            request.origin.epoch = min(shard.settled for shard in self.shards)
            try:
                reply = self.coordinator.call("FinishStep", request)
            except Refused as refused:
                if refused.reason != t.REASON_STALE_EPOCH:
                    raise
                self.settle()
                continue
            self.newest_epoch = max(self.newest_epoch, reply.epoch)
            return reply

    def lease(self):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            reply = self.coordinator.call("LeaseWork", c.LeaseWorkRequest(origin=self.origin()))
            self.clock = max(self.clock, reply.clock)
            if reply.WhichOneof("work") != "idle":
                return reply
            if time.monotonic() > deadline:
                raise TimeoutError(f"idle: {reply.idle.reason}")

    def step(self, split, start, end):
        self.pull(self.clock)
        gradients = self.model.gradients(self.values, split, start, end)
        receipts = self.push(self.clock, gradients)
        self.clock += 1
        self.finish(split, end, end - start, self.model.loss(self.values), receipts)

    def save(self):
        """Writes the weights to the run directory, as safetensors. Returns the file's SHA-256."""
        header, offset = {}, 0
        for (name, shape), values in zip(self.model.variables, self.values):
            end = offset + 4 * len(values)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)
        path = os.path.join(self.settings["run_dir"], "model.safetensors")
        with open(path + ".partial", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + b"".join(map(to_bytes, self.values)))
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + ".partial", path)
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def evaluate(self, reply):
        while True:
            epoch = self.pull(self.clock, reply.view)
            report = c.EvaluationReport(
                data_epoch=reply.evaluate.data_epoch, samples=self.model.evaluation_samples,
                metrics={"loss": self.model.loss(self.values)})
            if reply.evaluate.save_model:
                report.model_sha256 = self.save()
            try:
                self.coordinator.call("Report", c.ReportRequest(
                    origin=self.origin(epoch=epoch), evaluation=report))
                return
            except Refused as refused:
                if refused.reason != t.REASON_STALE_EPOCH:
                    raise
                self.settle()

    def train(self, each_step=lambda worker: None):
        """Works until the job is done. `each_step` is called after each step."""
        while True:
            reply = self.lease()
            work = reply.WhichOneof("work")
            if work == "done":
                return reply.done.error
            if work == "evaluate":
                self.evaluate(reply)
                if reply.evaluate.save_model:
                    self.model.final = [array("f", values) for values in self.values]
                continue
            start = reply.split.start
            while start < reply.split.end:
                end = min(start + self.model.batch, reply.split.end)
                self.step(reply.split, start, end)
                start = end
                each_step(self)

    def leave(self):
        """Gives the lease back."""
        self.stop()
        self.coordinator.call("Leave", c.LeaveRequest(origin=self.origin()))
        self.coordinator.channel.close()

    def stop(self):
        """Stops the heartbeats and closes the streams."""
        self.stopped.set()
        self.heart.join(2 * CALL_SECONDS)
        for shard in self.shards:
            self.close(shard)
