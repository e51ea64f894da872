// LowerThreadPriority: for threads whose work may take what others leave over.
#ifndef RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_
#define RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_

namespace ringattn {

// Of the calling thread, for good: ten steps of niceness (Linux keeps it per thread). Where that is
// refused nothing changes: threads only share more evenly. Cheap when repeated.
void LowerThreadPriority();

}  // namespace ringattn

#endif  // RINGATTN_COMMON_PROCESS_THREAD_PRIORITY_H_
