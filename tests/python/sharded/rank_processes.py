"""Processes that are the ranks of one torch.distributed group (gloo, CPU). They run functions of the tests.

A group is created once for each world size, because starting a process that imports PyTorch takes seconds.
"""
import faulthandler
import multiprocessing
import os
import traceback

SECONDS = 120  # limit of one function, and of the start of the processes


class RankError(AssertionError):
    """A function raised on a rank."""


class Ranks:
    """`world_size` processes. Not thread safe."""

    def __init__(self, world_size, store):
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect()  # each reports that it has joined the group

    def outcomes(self, function, *args):
        """Runs function(rank, world_size, *args) on every rank: [(result, exception's type name, its text)]."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._receive()

    def run(self, function, *args):
        """`outcomes`, of which none may be an exception: the results."""
        for pipe in self._pipes:
            pipe.send((function, args))
        return self._collect()

    def close(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _receive(self):
        outcomes = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(SECONDS):
                self.close()
                raise RankError(f"rank {rank} of {self.world_size} has not answered for {SECONDS} s")
            outcomes.append(pipe.recv())
        return outcomes

    def _collect(self):
        outcomes = self._receive()
        failed = [f"rank {rank}:\n{text}" for rank, (_, kind, text) in enumerate(outcomes) if kind]
        if failed:
            raise RankError("\n".join(failed))
        return [result for result, _, _ in outcomes]


def _serve(pipe, rank, world_size, store):
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    import ringattn

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    ringattn.set_default_client(ringattn.connect(os.environ["RINGATTN_ADDRESS"]), deadline=60.0)
    pipe.send((None, "", ""))
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((function(rank, world_size, *args), "", ""))
        except BaseException as error:
            pipe.send((None, type(error).__name__, f"{error}\n{traceback.format_exc()}"))
