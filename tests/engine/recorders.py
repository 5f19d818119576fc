"""A recorder that captures nothing and computes a piece again, on inputs of its own, whenever it is replayed."""

from dataclasses import replace

import torch


class FakeRecording:
    def __init__(self, recorder, task):
        self._recorder, self._task = recorder, task
        self._late = recorder.overlap and task.is_one_of_many
        self._inputs = [t.detach().clone() for t in task.inputs]
        self.num_bytes, self.num_copies = 0, 2 if self._late else 1

    def replay(self, inputs, seeds, between):
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        piece = self._task.piece(self._inputs, seeds, None)
        piece.forward()
        between(piece.products.numbers)
        piece.backward()
        return self._recorder.late(piece.products) if self._late else piece.products


class FakeRecorder:
    """Takes the place of `CudaRecorder`.

    With overlap, what a replay gives is not there before it is joined, and gone two replays later.
    """

    def __init__(self, device=None, *, overlap=False):
        del device
        self.overlap, self.recorded, self.room = overlap, [], True
        self._given = []
        self.num_joined = 0

    def record(self, task):
        self.recorded.append(FakeRecording(self, task))
        return self.recorded[-1]

    def late(self, products):
        """These products, as they come from a stream of their own."""
        right = [[None if g is None else g.clone() for g in shard] for shard in products.gradients]
        places = [[None if g is None else torch.full_like(g, torch.nan) for g in shard] for shard in right]

        def join():
            self.num_joined += 1
            for place, gradient in pairs(places, right):
                place.copy_(gradient)

        self._given.append(places)
        if len(self._given) > 2:
            for place, _ in pairs(self._given[-3], self._given[-3]):
                place.fill_(torch.nan)
        return replace(products, gradients=places, join=join)

    def has_room(self, num_bytes):
        del num_bytes
        return self.room

    def release(self):
        pass


def pairs(one, other):
    """The gradients of two lists that are there."""
    found = (pair for shards in zip(one, other, strict=True) for pair in zip(*shards, strict=True))
    return [pair for pair in found if pair[0] is not None]
