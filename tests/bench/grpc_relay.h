// Two processes that relay bytes over gRPC as they come: client -> relay -> sink and back, raw byte
// buffers, the transport settings of the service, and no code of the service's. Its rate is the
// upper bound that the library sets.
#ifndef RINGATTN_TESTS_BENCH_GRPC_RELAY_H_
#define RINGATTN_TESTS_BENCH_GRPC_RELAY_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <grpcpp/channel.h>

namespace ringattn::bench {

class GrpcRelay {
 public:
  // Forks: before any thread, and before gRPC is used.
  GrpcRelay();
  ~GrpcRelay();
  GrpcRelay(const GrpcRelay&) = delete;
  GrpcRelay& operator=(const GrpcRelay&) = delete;

  // Sends `bytes_up` to the sink and receives as many as `bytes_down`, on `streams` connections
  // at once.
  // The bytes are neither read nor copied. Returns seconds.
  double Exchange(int streams, int64_t bytes_up, int64_t bytes_down);

 private:
  pid_t sink_ = -1;
  pid_t relay_ = -1;
  std::string address_;
  std::vector<std::shared_ptr<grpc::Channel>> channels_;
};

}  // namespace ringattn::bench

#endif  // RINGATTN_TESTS_BENCH_GRPC_RELAY_H_
