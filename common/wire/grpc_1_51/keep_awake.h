// KeepAwake: makes gRPC run callbacks without delay, even after a pause.
//
// gRPC 1.51 runs all callbacks of a process, of servers and clients, on a few threads. These wait
// one second for events and then, if there were none, sleep for 100 ms without polling
// (CallbackAlternativeCQ in its completion_queue_cc.cc). So one isolated request in ten waited up
// to 100 ms on each side that uses the callback API. An event every quarter of a second keeps at
// least one thread polling: the thread that handled the latest event has three quarters of its
// second left when the next event arrives.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_

namespace ringattn::wire {

// In effect for the whole process while at least one instance exists. Costs a thread and four local
// calls a second, about 50 us each. Thread safe.
class KeepAwake {
 public:
  KeepAwake();
  ~KeepAwake();

  KeepAwake(const KeepAwake&) = delete;
  KeepAwake& operator=(const KeepAwake&) = delete;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_
