// KeepAwake: gRPC's callbacks come at once, also after a pause.
//
// gRPC 1.51 runs all callbacks of a process, servers' and clients', on a few threads that
// wait for events for a second and then, if none came, sleep for 100 ms and hear nothing
// (CallbackAlternativeCQ in its completion_queue_cc.cc). One lonely request in ten thus
// waited up to 100 ms on each side that uses the callback API. An event every quarter of a
// second leaves at least one thread listening at any time: whichever had the latest event
// has three quarters of its second left when the next one comes.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_

namespace ringattn::wire {

// Holds for the whole process while at least one exists. It costs a thread and four calls
// a second that reach no network, some 50 us each. Thread safe.
class KeepAwake {
 public:
  KeepAwake();
  ~KeepAwake();

  KeepAwake(const KeepAwake&) = delete;
  KeepAwake& operator=(const KeepAwake&) = delete;
};

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_KEEP_AWAKE_H_
