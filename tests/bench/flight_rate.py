#!/usr/bin/env python3
"""Arrow Flight, for comparison with transport_rate's direct streams: so many bytes up by do_put and
as many down by do_get, on as many streams, each with a separate connection, to as many server
processes. Needs pyarrow, which the project does not depend on.

  transport_rate ... --beside="VENV/bin/python tests/bench/flight_rate.py MEGABYTES SERVERS STREAMS"

One line in, the seconds that a round took out. The first round is verified. Flight's bytes stay where
Arrow received them; ringattn's are put into their places.
"""

import multiprocessing
import sys
import threading
import time

import pyarrow as pa
import pyarrow.flight as flight

BATCH = 1 << 20


def batches(data):
    for begin in range(0, len(data), BATCH):
        piece = data[begin:begin + BATCH]
        yield pa.record_batch([pa.Array.from_buffers(pa.uint8(), len(piece),
                                                     [None, pa.py_buffer(piece)])], ["bytes"])


SCHEMA = pa.schema([("bytes", pa.uint8())])


class Server(flight.FlightServerBase):
    def __init__(self, size):
        super().__init__("grpc://127.0.0.1:0")
        self.answer = bytes(range(256)) * (size // 256 + 1)
        self.put = {}

    def do_put(self, context, descriptor, reader, writer):
        received, first = 0, None
        while True:
            try:
                batch = reader.read_chunk().data
            except StopIteration:
                break
            first = batch if first is None else first
            received += len(batch)
        self.put[descriptor.path[0]] = (received, first.column(0)[:16].to_pylist())

    def do_get(self, context, ticket):
        size = int(ticket.ticket)
        return flight.GeneratorStream(SCHEMA, batches(memoryview(self.answer)[:size]))

    def do_action(self, context, action):
        yield flight.Result(repr(self.put[action.body.to_pybytes()]).encode())


def serve(pipe, size):
    server = Server(size)
    pipe.send(server.port)
    server.serve()


def main():
    megabytes, servers, streams = (int(argument) for argument in sys.argv[1:4])
    size = megabytes * 1_000_000 // (servers * streams)
    data = bytes(reversed(range(256))) * (size // 256 + 1)
    clients, spawn = [], multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    for _ in range(servers):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(theirs, size), daemon=True).start()
        port = ours.recv()
        # One connection each: gRPC would share it among equal channels.
        clients += [flight.FlightClient(f"grpc://127.0.0.1:{port}", generic_options=[
            ("grpc.use_local_subchannel_pool", 1)]) for _ in range(streams)]
    received = [None] * len(clients)

    def move(index):
        client, name = clients[index], f"{index}".encode()
        writer, _ = client.do_put(flight.FlightDescriptor.for_path(name), SCHEMA)
        for batch in batches(memoryview(data)[:size]):
            writer.write_batch(batch)
        writer.close()
        total, first = 0, None
        for chunk in client.do_get(flight.Ticket(str(size).encode())):
            first = chunk.data if first is None else first
            total += len(chunk.data)
        received[index] = (total, first.column(0)[:16].to_pylist())

    def round_():
        threads = [threading.Thread(target=move, args=(i,)) for i in range(len(clients))]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begin

    verified = False
    for _ in sys.stdin:
        seconds = round_()
        if not verified:
            verified = True
            for index, client in enumerate(clients):
                assert received[index] == (size, list(range(16))), received[index]
                result = next(client.do_action(flight.Action("put", f"{index}".encode())))
                assert result.body.to_pybytes() == repr(
                    (size, list(range(255, 239, -1)))).encode(), result.body.to_pybytes()
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
