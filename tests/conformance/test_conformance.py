"""Conformance: a client in another language, written from proto/ alone, against the real processes."""

import struct
import time
import unittest
from array import array

from flambeau.v1 import coordinator_pb2 as c
from flambeau.v1 import parameter_server_pb2 as p
from flambeau.v1 import types_pb2 as t

import order
from client import Worker
from wire import Broken, Refused, Stream, block_id, from_bytes, key, to_bytes
from cluster import Cluster, Counting, beside, eventually, job


def work(worker, **hooks):
    """Works as a worker until the job is done. Returns the worker."""
    try:
        worker.start()
        error = worker.train(**hooks)
        worker.leave()
    finally:
        worker.stop()
    if error:
        raise AssertionError(error)
    return worker


def trained(cluster, model, identity, kind=Worker, **hooks):
    """Joins as a worker and works until the job is done. Returns the worker."""
    return work(kind(cluster.address, identity, model), **hooks)


def float32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


class Order(unittest.TestCase):
    def test_the_vectors_of_the_comment_hold(self):
        # The first one is pinned in crates/data/src/shuffle.rs as well.
        self.assertEqual(order.order(1, 0, 10), [0, 1, 5, 4, 8, 9, 2, 7, 3, 6])
        self.assertEqual(
            order.order(7, 3, 20), [9, 3, 10, 19, 16, 17, 5, 18, 15, 13, 0, 6, 7, 11, 1, 12, 2, 14, 4, 8])
        self.assertEqual(order.order(2**40 + 5, 1, 8), [5, 1, 4, 7, 6, 0, 3, 2])
        self.assertEqual(order.order(1, 0, 60_000)[:8], [2889, 46957, 1411, 5902, 12338, 4783, 19286, 53965])
        self.assertEqual(order.permutation(7, 0, 1, 10), [0, 4, 1, 5, 2, 3, 8, 6, 7, 9])


class Runs(unittest.TestCase):
    def check(self, worker, summary, steps, samples, epochs):
        """The final weights are the initial ones less one a step, and each sample was visited once an epoch."""
        model = worker.model
        self.assertEqual(summary["steps"], steps, summary)
        self.assertEqual(summary["samples"], samples * epochs, summary)
        self.assertEqual(summary["lost_updates"], 0, summary)
        self.assertEqual(summary["test_loss"], 0.5 - steps, summary)
        for variable, initial in enumerate(model.initial()[:3]):
            expected = array("f", (value - steps for value in initial))
            self.assertEqual(model.final[variable], expected, model.variables[variable])
        self.assertEqual(model.final[3], array("f", [-epochs]) * samples, "each sample once an epoch")

    def run_of(self, mode, workers, bound=None, kind=Worker):
        samples, epochs = 120, 2
        with Cluster(job(mode, samples, epochs, staleness=bound), workers) as cluster:
            models = [Counting(samples) for _ in range(workers)]
            runs = [lambda i=i: trained(cluster, models[i], f"python-{i}", kind) for i in range(workers)]
            done = beside(*runs)
            summary, saved = cluster.finish(), cluster.model()
        (last,) = [worker for worker in done if worker.model.final]
        self.assertEqual([saved[name] for name, _ in last.model.variables],
                         [(shape, values) for (_, shape), values in zip(last.model.variables, last.model.final)])
        self.check(last, summary, samples * epochs // 10, samples, epochs)
        self.assertEqual(sum(worker.pushes for worker in done), samples * epochs // 10)
        self.assertEqual(summary["mode"], mode)
        return done, summary

    def test_async(self):
        self.run_of("async", 2)

    def test_bounded(self):
        done, summary = self.run_of("bounded", 2, bound=2)
        for lead in [summary["max_clock_lead"], *(worker.max_lead for worker in done)]:
            self.assertLessEqual(lead, 2, "no pull is answered beyond the bound")

    def test_sync(self):
        done, _ = self.run_of("sync", 1)
        self.assertEqual(done[0].max_lead, 0)

    def test_streams_that_are_cut_with_pushes_under_way(self):
        done, _ = self.run_of("async", 2, kind=Cutting)
        self.assertGreater(sum(worker.cuts for worker in done), 10)

    def test_streams_that_are_cut_in_sync_mode(self):
        done, _ = self.run_of("sync", 1, kind=Cutting)
        self.assertGreater(done[0].cuts, 10)

    def test_in_sync_mode_a_second_push_replaces_the_first(self):
        self.run_of("sync", 1, kind=Twice)

    def test_in_sync_mode_a_step_is_the_weighted_mean_in_rank_order(self):
        # Steps of 10 and 10, then of 10 and 5 samples.
        with Cluster(job("sync", 35), 2) as cluster:
            workers = [Worker(cluster.address, f"python-{rank}", Ranked(35, rank)) for rank in range(2)]
            self.assertEqual([worker.task.index for worker in workers], [0, 1])
            beside(*(lambda w=w: work(w) for w in workers))
            summary = cluster.finish()
        self.assertEqual((summary["steps"], summary["samples"]), (2, 35), summary)
        (final,) = [worker.model.final for worker in workers if worker.model.final]
        weights = workers[0].model.initial()[0]
        for parts in ([10, 10], [10, 5]):
            for element in range(3):
                mean = 0.0
                for rank, part in enumerate(parts):
                    share = float32(part / sum(parts))
                    gradient = workers[rank].model.ones[0][element]
                    mean = float32(mean + float32(share * gradient))
                weights[element] = float32(weights[element] - mean)
        self.assertEqual(list(final[0]), list(weights), "bit for bit")


class Ranked(Counting):
    """Gradients that tell the ranks apart, and that no float has exactly."""

    def __init__(self, samples, rank):
        super().__init__(samples)
        self.ones[0] = array("f", [0.1 + rank, 0.7 / (rank + 1), -3.3 * rank])


class Twice(Worker):
    """Pushes something else first, in each step."""

    def push(self, clock, gradients):
        super().push(clock, [array("f", [9.0]) * len(values) for values in gradients])
        self.pushes -= 1
        return super().push(clock, gradients)


class Cutting(Worker):
    """Closes the stream after sending a push, before it reads the answer; sometimes at once, sometimes when the
    server may have answered."""

    cuts = 0

    def answer(self, shard, sequence):
        if "push" in shard.unanswered.get(sequence, {}) and self.clock % 3 != 2:
            if self.clock % 3 == 1:
                time.sleep(0.05)
            self.close(shard)
            self.cuts += 1
        return super().answer(shard, sequence)


class ByHand(unittest.TestCase):
    """Single messages of a worker that holds a split at clock 0."""

    mode, bound = "async", None

    def setUp(self):
        self.cluster = Cluster(job(self.mode, 100, staleness=self.bound), 1)
        self.addCleanup(self.cluster.end)
        self.worker = Worker(self.cluster.address, "python", Counting(100))
        self.addCleanup(self.worker.stop)
        self.worker.start()
        self.work = self.worker.lease()
        self.worker.pull(0)
        # From here on, the shard of this block has a session of its own.
        self.shard = self.worker.shards[self.worker.map.variables[0].shards[0]]
        self.worker.close(self.shard)

    def hello(self, **more):
        origin = self.worker.origin(epoch=self.worker.map.epoch)
        hello = p.Hello(protocol_version=1, origin=origin, view=self.worker.view)
        for field, value in more.items():
            setattr(hello if field == "protocol_version" else hello.origin, field, value)
        return hello

    def open(self, **more):
        stream = Stream(self.worker.map.shard_addresses[self.shard.number], self.hello(**more))
        self.addCleanup(stream.close)
        return stream

    def push(self, sequence, value=1.0, **more):
        origin = t.Origin(job=self.worker.job, task=self.worker.task, epoch=self.worker.map.epoch,
                          clock=0, sequence=sequence)
        for field, other in more.items():
            getattr(origin, field).CopyFrom(other) if field == "task" else setattr(origin, field, other)
        payload = t.Payload(dtype=t.DTYPE_F32, dense=to_bytes([value] * 3))
        return p.Push(origin=origin, gradients=[p.Gradient(block=block_id((0, 0)), payload=payload)])

    def bias(self, stream):
        pull = p.Pull(origin=self.worker.origin(0, self.worker.map.epoch),
                      blocks=[t.WantedBlock(block=block_id((0, 0)))])
        (block,) = stream.ask(pull=pull).weights.blocks
        return list(from_bytes(block.payload.dense)), block.version.version

    def refused(self, stream, reason, **kind):
        answer = stream.ask(**kind)
        self.assertEqual(answer.WhichOneof("kind"), "refused", answer)
        self.assertEqual(t.Reason.Name(answer.refused.reason), t.Reason.Name(reason), answer)
        (message,) = kind.values()
        self.assertEqual(answer.refused.sequence, message.origin.sequence)
        self.assertTrue(answer.refused.message)

    def fails(self, reason, call):
        with self.assertRaises(Refused) as caught:
            call()
        self.assertEqual(t.Reason.Name(caught.exception.reason), t.Reason.Name(reason), caught.exception)


class Bound(ByHand):
    mode, bound = "bounded", 2

    def pull(self, clock):
        return p.Pull(origin=self.worker.origin(clock, self.worker.map.epoch),
                      blocks=[t.WantedBlock(block=block_id((0, 0)))])

    def test_a_clock_is_admitted_up_to_the_min_clock_and_the_bound(self):
        stream = self.open()
        answer = stream.ask(pull=self.pull(2))
        self.assertEqual((answer.WhichOneof("kind"), answer.weights.min_clock), ("weights", 0))
        late = self.pull(3)
        stream.send(pull=late)
        waiting = stream.receive().waiting
        self.assertEqual((waiting.request, waiting.min_clock), (late.origin.sequence, 0))
        self.assertEqual([task.index for task in waiting.on], [self.worker.task.index])
        self.refused(stream, t.REASON_FUTURE_CLOCK, pull=self.pull(4))
        self.refused(stream, t.REASON_FUTURE_CLOCK, push=self.push(1001, clock=3))
        self.assertEqual(stream.ask(push=self.push(1002, clock=2)).acknowledged.sequence, 1002)
        # The first step is counted, so the pull that waits is answered, with what was pushed meanwhile.
        split = self.work.split
        self.cluster.calls.call("FinishStep", c.FinishStepRequest(
            origin=self.worker.origin(1, self.worker.map.epoch), split=split.id, position=split.start + 10,
            steps=1, samples=10, loss_sum=1.0))
        weights = stream.receive().weights
        self.assertEqual((weights.request, weights.min_clock), (late.origin.sequence, 1))
        self.assertEqual(weights.blocks[0].version.version, 1)


class Refusals(ByHand):
    def test_what_is_wrong_is_refused_by_reason_and_changes_nothing(self):
        calls, worker = self.cluster.calls, self.worker
        register = c.RegisterRequest(protocol_version=2, role=t.ROLE_WORKER, identity="newer")
        self.fails(t.REASON_WRONG_PROTOCOL_VERSION, lambda: calls.call("Register", register))
        self.fails(t.REASON_WRONG_PROTOCOL_VERSION, lambda: self.open(protocol_version=2))
        self.fails(t.REASON_FOREIGN_JOB, lambda: self.open(job="another"))
        foreign = worker.origin()
        foreign.job = "another"
        self.fails(t.REASON_FOREIGN_JOB, lambda: calls.call("LeaseWork", c.LeaseWorkRequest(origin=foreign)))

        stream = self.open()
        self.assertEqual(stream.welcome.protocol_version, 1)
        before = self.bias(stream)
        other = t.Task(role=t.ROLE_WORKER, index=9, generation=1)
        self.refused(stream, t.REASON_FOREIGN_JOB, push=self.push(1001, job="another"))
        self.refused(stream, t.REASON_MALFORMED, push=self.push(1001, task=other))
        self.refused(stream, t.REASON_MALFORMED, push=self.push(0))
        self.refused(stream, t.REASON_STALE_EPOCH, push=self.push(1001, epoch=worker.map.epoch + 1))
        wrong = self.push(1001)
        wrong.gradients[0].payload.dense = to_bytes([1.0])
        self.refused(stream, t.REASON_WRONG_SHAPE, push=wrong)
        wrong = self.push(1001)
        wrong.gradients[0].block.variable = 9
        self.refused(stream, t.REASON_UNKNOWN_VARIABLE, push=wrong)
        self.refused(stream, t.REASON_NON_FINITE, push=self.push(1001, value=float("nan")))
        self.assertEqual(self.bias(stream), before)

    def test_a_push_that_was_refused_is_not_taken_after_a_later_one(self):
        stream = self.open()
        self.refused(stream, t.REASON_NON_FINITE, push=self.push(1001, value=float("inf")))
        self.assertEqual(stream.ask(push=self.push(1002)).acknowledged.sequence, 1002)
        self.refused(stream, t.REASON_OUT_OF_ORDER, push=self.push(1001))
        self.assertEqual(self.bias(stream), ([-0.5, -2.0, 1.0], 1))
        # Under a new number it is taken.
        self.assertEqual(stream.ask(push=self.push(1003)).acknowledged.sequence, 1003)
        self.assertEqual(self.bias(stream), ([-1.5, -3.0, 0.0], 2))

    def test_a_push_is_applied_once_however_often_it_is_sent(self):
        first = self.open()
        self.assertEqual(first.ask(push=self.push(1001)).acknowledged.level, p.ACKNOWLEDGEMENT_LEVEL_APPLIED)
        # Had this acknowledgement been lost, the worker would send again. A newer session ends the older one.
        stream = self.open()
        with self.assertRaises(Broken):
            first.receive()
        for _ in range(3):
            acknowledged = stream.ask(push=self.push(1001)).acknowledged
            self.assertEqual([(key(v.block), v.version) for v in acknowledged.blocks], [((0, 0), 1)])
        self.assertEqual(self.bias(stream), ([-0.5, -2.0, 1.0], 1))
        outcome = self.outcome()
        self.assertEqual((outcome.sequence, outcome.clock, outcome.taken), (1001, 0, 1))

    def outcome(self):
        """Returns the outcome of the block, asked for in a session of its own."""
        stream = self.open()
        ask = p.AskOutcome(origin=self.worker.origin(0, self.worker.map.epoch), blocks=[block_id((0, 0))])
        (outcome,) = stream.ask(ask_outcome=ask).outcome.blocks
        return outcome

    def test_finish_step_has_a_number_and_the_epoch_in_force(self):
        split = self.work.split
        epoch = self.worker.map.epoch

        def finish(sequence, epoch):
            origin = t.Origin(job=self.worker.job, task=self.worker.task, epoch=epoch, clock=1, sequence=sequence)
            return self.cluster.calls.call("FinishStep", c.FinishStepRequest(
                origin=origin, split=split.id, position=split.start + 10, steps=1, samples=10, loss_sum=1.0))

        samples = lambda: self.cluster.status().samples
        self.fails(t.REASON_OUT_OF_ORDER, lambda: finish(0, epoch))
        self.fails(t.REASON_STALE_EPOCH, lambda: finish(2000, epoch - 1))
        self.assertEqual(samples(), 0, "what was refused counts nothing")
        for _ in range(2):
            finish(2000, epoch)
            self.assertEqual(samples(), 10, "it counts once")
        self.fails(t.REASON_OUT_OF_ORDER, lambda: finish(1999, epoch))


class Faults(unittest.TestCase):
    def test_in_sync_mode_a_worker_without_receipts_is_evicted_alone(self):
        samples = 120
        with Cluster(job("sync", samples), 2) as cluster:
            good, bad = Counting(samples), Counting(samples)
            outcome = {}

            def breaks_the_protocol():
                worker = Worker(cluster.address, "bad", bad)
                try:
                    worker.start()
                    split = worker.lease().split
                    worker.pull(worker.clock)
                    worker.clock += 1
                    with self.assertRaises(Refused) as caught:
                        worker.finish(split, split.end, split.end - split.start, 1.0)
                    outcome["finish"] = caught.exception.reason
                    with self.assertRaises(Refused) as caught:
                        worker.lease()
                    outcome["lease"] = caught.exception.reason
                finally:
                    worker.stop()

            worker, _ = beside(lambda: trained(cluster, good, "good"), breaks_the_protocol)
            summary = cluster.finish()
        self.assertEqual(outcome, {"finish": t.REASON_MALFORMED, "lease": t.REASON_FENCED})
        self.assertEqual(summary["samples"], samples, summary)
        self.assertEqual(summary["steps"], worker.pushes)
        self.assertEqual(summary["test_loss"], 0.5 - summary["steps"])
        self.assertEqual(good.final[3], array("f", [-1.0]) * samples)

    def test_a_server_that_dies_and_comes_back_loses_what_is_reported(self):
        samples, steps, death = 400, 40, 25
        checkpoint = "every_seconds = 3600.0\nevery_steps = 20"
        with Cluster(job("async", samples, checkpoint=checkpoint), 1) as cluster:
            model, seen = Counting(samples), {}

            class Bereft(Worker):
                def push(self, clock, gradients):
                    if clock != death:
                        return super().push(clock, gradients)
                    # The messages are on their way when the server dies; no answer has been read.
                    for shard in self.shards:
                        if shard.stream is None:
                            self.open(shard)
                    old = self.map.epoch
                    post = self.post

                    def post_all(shard, **kind):
                        sequence = post(shard, **kind)
                        seen.setdefault("sent", []).append((shard.number, sequence))
                        return sequence

                    answer = self.answer

                    def die_first(shard, sequence):
                        self.answer = answer
                        seen["unanswered"] = [s for n, s in seen["sent"] if n == 1]
                        cluster.ps[1].kill()
                        cluster.server(1)
                        eventually(lambda: self.newer(old), "there is a newer map with a server for each shard")
                        stale = c.FinishStepRequest(origin=self.origin(clock, old), split=1, position=1, steps=1)
                        try:
                            self.coordinator.call("FinishStep", stale)
                        except Refused as refused:
                            seen["stale"] = refused.reason
                        return answer(shard, sequence)

                    self.post, self.answer = post_all, die_first
                    try:
                        return super().push(clock, gradients)
                    finally:
                        self.post = post

                def newer(self, old):
                    shard_map = self.coordinator.call("GetShardMap", c.ShardMapRequest())
                    return shard_map.epoch > old and all(shard_map.shard_addresses)

            def each_step(worker):
                if worker.clock == death - 3:
                    # The last three steps are in no checkpoint, and the first 20 are.
                    eventually(lambda: cluster.status().checkpoint.number >= 1, "checkpoint 1 is whole")

            worker = trained(cluster, model, "python", Bereft, each_step=each_step)
            summary = cluster.finish()
        self.assertEqual(seen["stale"], t.REASON_STALE_EPOCH)
        self.assertGreater(len(seen["unanswered"]), 0)
        lost = {block: count for shard in worker.shards for block, count in shard.lost.items() if count}
        self.assertTrue(lost)
        self.assertEqual(summary["lost_updates"], sum(lost.values()), summary)
        self.assertEqual(worker.reported_lost, sum(lost.values()))
        self.assertEqual((summary["steps"], worker.pushes), (steps, steps))
        for variable, initial in enumerate(model.initial()[:3]):
            for index, shard in enumerate(worker.map.variables[variable].shards):
                start, end = worker.range((variable, index))
                gone = lost.get((variable, index), 0)
                self.assertEqual(gone > 0, shard == 1, "only the shard whose server died loses something")
                self.assertLessEqual(gone, death - 20, "what the checkpoint has is not lost")
                expected = array("f", (value - (steps - gone) for value in initial[start:end]))
                self.assertEqual(model.final[variable][start:end], expected, "weights + lost == pushes")


if __name__ == "__main__":
    unittest.main(verbosity=2)
