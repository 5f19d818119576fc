"""A recorder that captures nothing and computes a piece again, on inputs of its own, whenever it is replayed."""


class FakeRecording:
    def __init__(self, task):
        self._inputs = [t.detach().clone() for t in task.inputs]
        self._task = task
        self.num_bytes = 0
        self.products = None

    def replay(self, inputs, seeds, between):
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        piece = self._task.piece(self._inputs, seeds, None)
        piece.forward()
        between(piece.products.numbers)
        piece.backward()
        self.products = piece.products


class FakeRecorder:
    def __init__(self):
        self.recorded = []
        self.room = True

    def record(self, task):
        self.recorded.append(FakeRecording(task))
        return self.recorded[-1]

    def has_room(self, num_bytes):
        del num_bytes
        return self.room

    def release(self):
        pass
