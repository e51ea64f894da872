// SetCallbackThreads: how many threads run gRPC's callbacks.
//
// gRPC 1.51 starts half as many callback threads as the machine has processors, 2 to 16
// (CallbackAlternativeCQ). One of them at a time waits for all sockets of the process. After each
// event it wakes the thread that has slept longest, and then handles the event. On a machine with
// many processors, each step of a small call therefore waits for a halted processor, whose cache
// has nothing of the call. gRPC has no setting for the number of threads, so this overrides
// gpr_cpu_num_cores(), from which gRPC derives it.
//
// The override needs a program that links gRPC's shared libraries. Do not link this into a library
// that other programs load.
#ifndef RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_THREADS_H_
#define RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_THREADS_H_

namespace ringattn::wire {

inline constexpr int kLeastCallbackThreads = 2;
inline constexpr int kMostCallbackThreads = 16;

// `threads` is in the range above. Call before anything of gRPC is used.
void SetCallbackThreads(int threads);

// Returns half of the processors up to four threads, then a quarter, within the range. On 16
// processors, large tensors pass through a coordinator as fast with four threads as with eight, and
// small requests take less time.
int DefaultCallbackThreads(int processors);
int DefaultCallbackThreads();  // of this machine

// Returns how many of them serve while no tensors pass through (resting_threads.h): one with two
// processors, where several requests in flight then take two thirds of the processor time, and two
// with more.
int ServingCallbackThreads(int processors);
int ServingCallbackThreads();  // of this machine

}  // namespace ringattn::wire

#endif  // RINGATTN_COMMON_WIRE_GRPC_1_51_CALLBACK_THREADS_H_
