"""The client's transport: calls to the coordinator, streams to servers, refusals, payloads."""

import contextlib
import queue
import sys
import threading
import time
from array import array

import grpc

from flambeau.v1 import coordinator_pb2_grpc, parameter_server_pb2_grpc
from flambeau.v1 import parameter_server_pb2 as p
from flambeau.v1 import types_pb2 as t

# Deadline of one call to the coordinator; those that wait answer within half of it.
CALL_SECONDS = 10
# Deadline of everything else that is waited for.
PATIENCE_SECONDS = 60
REASON_KEY = "flambeau-reason"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]


class Refused(Exception):
    """An answer with a Reason."""

    def __init__(self, reason, code, message):
        super().__init__(f"{t.Reason.Name(reason)}: {message}")
        self.reason, self.code, self.message = reason, code, message


class Broken(Exception):
    """The stream has ended, or cannot be opened; another try may help."""


def refusal_of(error):
    """Returns the refusal that a gRPC error carries in its metadata, if it carries one."""
    for key, value in error.trailing_metadata() or ():
        if key == REASON_KEY:
            return Refused(int(value), error.code(), error.details())
    return None


def to_bytes(values):
    values = array("f", values)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def from_bytes(data):
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def key(block):
    return block.variable, block.index


def block_id(block):
    return t.BlockId(variable=block[0], index=block[1])


class Coordinator:
    """Calls to the coordinator. If the answer to a call is lost, the call is made again unchanged."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address, OPTIONS)
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)

    def call(self, name, request):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return getattr(self.stub, name)(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                refused = refusal_of(error)
                if refused is not None:
                    raise refused from None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


class Stream:
    """One stream to a server: Hello and Welcome, then messages out, and answers into `answers`."""

    def __init__(self, address, hello):
        self.channel = grpc.insecure_channel(address, OPTIONS)
        self.outgoing = queue.Queue(4096)
        stub = parameter_server_pb2_grpc.ParameterServerStub(self.channel)
        self.outgoing.put(p.ClientMessage(hello=hello))
        self.call = stub.Session(iter(self.outgoing.get, None))
        # The first answer has a deadline too.
        timer = threading.Timer(2 * CALL_SECONDS, self.call.cancel)
        timer.start()
        try:
            self.welcome = self.receive().welcome
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()

    def send(self, **kind):
        self.outgoing.put(p.ClientMessage(**kind), timeout=CALL_SECONDS)

    def receive(self):
        try:
            return next(self.call)
        except StopIteration:
            raise Broken("the server closed the stream") from None
        except grpc.RpcError as error:
            refused = refusal_of(error)
            if refused is not None:
                raise refused from None
            raise Broken(f"{error.code()}: {error.details()}") from None

    def ask(self, **kind):
        """Sends a message and returns its answer. The deadline ends the stream."""
        self.send(**kind)
        timer = threading.Timer(PATIENCE_SECONDS, self.call.cancel)
        timer.start()
        try:
            while True:
                answer = self.receive()
                if answer.WhichOneof("kind") != "waiting":
                    return answer
        finally:
            timer.cancel()

    def close(self):
        self.call.cancel()
        with contextlib.suppress(queue.Full):
            self.outgoing.put_nowait(None)
        self.channel.close()
