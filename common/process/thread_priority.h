// LowerThreadPriority: for threads that should use only spare processor time.
#ifndef RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_
#define RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_

namespace ringattn {

// Permanently raises the calling thread's nice value by ten (Linux keeps it per thread). If the
// system rejects it, nothing changes and threads share time evenly. Repeated calls are cheap.
void LowerThreadPriority();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_
