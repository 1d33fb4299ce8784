"""A worker over the raw client: attaches, registers a model, and calls with its key."""

import wire
from http2 import OK, TESSERA, Connection, envelope

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 64
MODEL = wire.model("small", LAYERS, KV_HEADS, HEAD_DIM)


class Refused(Exception):
    """A call that was not answered with OK; the status is None where nothing was answered."""

    def __init__(self, what, status, reason=""):
        super().__init__(f"{what}: status {status} {reason}")
        self.status = status


def rows(tokens, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, value=b"\x80\x3f"):
    """Keys or values of so many tokens, all of one bf16 value."""
    return wire.tensor([layers, tokens, kv_heads, head_dim],
                       value * (layers * tokens * kv_heads * head_dim))


class Session:
    """An attached session. Its lease is a stream of `connection`, which also carries its calls."""

    def __init__(self, address, token="", connection=None, seconds=5):
        self.connection = connection or Connection(address)
        self.stream = self.connection.open(TESSERA + "Attach")
        self.connection.send_data(self.stream, envelope(wire.hello(token)), seconds=seconds)
        self.connection.wait(lambda: self.stream.messages() or self.stream.ended, seconds)
        messages = self.stream.messages()
        if not messages:
            if connection is None:
                self.connection.close()
            raise Refused("Attach", self.stream.status, self.stream.reason)
        welcome = wire.fields(wire.fields(messages[0])[1][0])
        key = wire.fields(welcome[1][0])
        self.id = key[1][0]
        self.key = wire.session_key(self.id, key[2][0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.connection.close()

    def request(self, method, message=b"", seconds=5):
        """(status, answer) of a call."""
        return self.connection.call(TESSERA + method, self.key + message, seconds)

    def call(self, method, message=b"", seconds=5):
        """The fields of the answer of a call that must succeed."""
        stream = self.connection.start(TESSERA + method, self.key + message, seconds=seconds)
        status, answer = self.connection.finish(stream, seconds)
        if status != OK:
            raise Refused(method, status, stream.reason)
        return wire.fields(answer)

    def register(self, model=MODEL):
        return self.call("RegisterModel", wire.nested(2, model))[1][0]

    def create(self, model_id, policy=""):
        return self.call("CreateSequence", wire.fixed64(2, model_id) + wire.nested(3, policy))[1][0]

    def append(self, sequence, first_token, tensor, seconds=5):
        """Appends the same rows as keys and as values; returns the tokens that there are now."""
        message = (wire.fixed64(2, sequence) + wire.number(5, first_token)
                   + wire.nested(6, tensor) + wire.nested(7, tensor))
        return wire.first(self.call("Append", message, seconds), 1)

    def describe(self, sequence, seconds=5):
        return self.call("Describe", wire.fixed64(2, sequence), seconds)

    def free(self, sequence):
        return self.call("Free", wire.nested(2, sequence.to_bytes(8, "little")))

    def used_bytes(self):
        """What the daemon charges to the session's tenant, by tag."""
        tenant = wire.fields(self.call("Stats")[9][0])
        return {wire.first(entry, 1, b"").decode(): wire.first(entry, 2)
                for entry in map(wire.fields, tenant.get(9, []))}
