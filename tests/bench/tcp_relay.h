// A plain TCP relay, the yardstick for the service's data path: client -> relay ->
// sink and back, each its own process on loopback, blocking sockets, large buffers.
#ifndef RINGATTN_TESTS_BENCH_TCP_RELAY_H_
#define RINGATTN_TESTS_BENCH_TCP_RELAY_H_

#include <sys/types.h>

#include <cstdint>

namespace ringattn::bench {

// Forks the relay and the sink; they end with the object.
class TcpRelay {
 public:
  TcpRelay();
  ~TcpRelay();

  TcpRelay(const TcpRelay&) = delete;
  TcpRelay& operator=(const TcpRelay&) = delete;

  // Sends `bytes_up` through the relay to the sink, which answers with `bytes_down`
  // when it has them all, on each of `streams` connections at once. Seconds for all.
  double Exchange(int streams, int64_t bytes_up, int64_t bytes_down) const;
  // The same with the sink itself: one hop.
  double ExchangeWithSink(int streams, int64_t bytes_up, int64_t bytes_down) const;

 private:
  pid_t sink_ = 0;
  pid_t relay_ = 0;
  int port_ = 0;
  int sink_port_ = 0;
};

}  // namespace ringattn::bench

#endif  // RINGATTN_TESTS_BENCH_TCP_RELAY_H_
