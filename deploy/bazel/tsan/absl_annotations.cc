// Reports absl's synchronization to ThreadSanitizer. The distribution's absl is not instrumented,
// so without this every access under an absl::Mutex is reported as a race.
//
// The functions below have the names of absl's own (20220623, Debian's namespace). They precede
// those of the shared library in the program and in all of its libraries, and call them. If absl
// has other names, they are unused. .bazelrc links this file into every program of --config=tsan.
//
// While a thread releases or awaits a lock, absl evaluates conditions of other threads that wait
// for it. ThreadSanitizer would place these accesses after the release, so they are ignored.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace {

struct TimeValue {  // absl::Time and absl::Duration
  int64_t high;
  uint32_t low;
};

void* Original(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) std::abort();
  return found;
}

class Ignored {
 public:
  Ignored() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Ignored() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

// Calls a function of absl, whose accesses are ignored.
template <typename Result, typename... Arguments>
Result Call(void* function, Arguments... arguments) {
  const Ignored ignored;
  return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
}

}  // namespace

#define NAME(symbol) static void* const original = Original(#symbol)

#define LOCK(symbol)                    \
  extern "C" void symbol(void* mutex) { \
    NAME(symbol);                       \
    Call<void>(original, mutex);        \
    __tsan_acquire(mutex);              \
  }
#define TRY_LOCK(symbol)                             \
  extern "C" bool symbol(void* mutex) {              \
    NAME(symbol);                                    \
    const bool locked = Call<bool>(original, mutex); \
    if (locked) __tsan_acquire(mutex);               \
    return locked;                                   \
  }
#define UNLOCK(symbol)                  \
  extern "C" void symbol(void* mutex) { \
    NAME(symbol);                       \
    __tsan_release(mutex);              \
    Call<void>(original, mutex);        \
  }
#define AWAIT(symbol)                                          \
  extern "C" void symbol(void* mutex, const void* condition) { \
    NAME(symbol);                                              \
    __tsan_release(mutex);                                     \
    Call<void>(original, mutex, condition);                    \
    __tsan_acquire(mutex);                                     \
  }
#define AWAIT_UNTIL(symbol)                                                    \
  extern "C" bool symbol(void* mutex, const void* condition, TimeValue time) { \
    NAME(symbol);                                                              \
    __tsan_release(mutex);                                                     \
    const bool met = Call<bool>(original, mutex, condition, time);             \
    __tsan_acquire(mutex);                                                     \
    return met;                                                                \
  }
#define LOCK_WHEN(symbol)                                      \
  extern "C" void symbol(void* mutex, const void* condition) { \
    NAME(symbol);                                              \
    Call<void>(original, mutex, condition);                    \
    __tsan_acquire(mutex);                                     \
  }
#define LOCK_WHEN_UNTIL(symbol)                                                \
  extern "C" bool symbol(void* mutex, const void* condition, TimeValue time) { \
    NAME(symbol);                                                              \
    const bool met = Call<bool>(original, mutex, condition, time);             \
    __tsan_acquire(mutex);                                                     \
    return met;                                                                \
  }

LOCK(_ZN4absl7debian35Mutex4LockEv)
LOCK(_ZN4absl7debian35Mutex10ReaderLockEv)
TRY_LOCK(_ZN4absl7debian35Mutex7TryLockEv)
TRY_LOCK(_ZN4absl7debian35Mutex13ReaderTryLockEv)
UNLOCK(_ZN4absl7debian35Mutex6UnlockEv)
UNLOCK(_ZN4absl7debian35Mutex12ReaderUnlockEv)
AWAIT(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)
AWAIT_UNTIL(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)
AWAIT_UNTIL(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)
LOCK_WHEN(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)
LOCK_WHEN(_ZN4absl7debian35Mutex14ReaderLockWhenERKNS0_9ConditionE)
LOCK_WHEN_UNTIL(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE)
LOCK_WHEN_UNTIL(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE)

extern "C" void _ZN4absl7debian37CondVar4WaitEPNS0_5MutexE(void* variable, void* mutex) {
  NAME(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE);
  __tsan_release(mutex);
  Call<void>(original, variable, mutex);
  __tsan_acquire(mutex);
}

#define COND_VAR_UNTIL(symbol)                                          \
  extern "C" bool symbol(void* variable, void* mutex, TimeValue time) { \
    NAME(symbol);                                                       \
    __tsan_release(mutex);                                              \
    const bool expired = Call<bool>(original, variable, mutex, time);   \
    __tsan_acquire(mutex);                                              \
    return expired;                                                     \
  }
COND_VAR_UNTIL(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)
COND_VAR_UNTIL(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)

UNLOCK(_ZN4absl7debian312Notification6NotifyEv)
LOCK(_ZNK4absl7debian312Notification19WaitForNotificationEv)
#define NOTIFIED_UNTIL(symbol)                                      \
  extern "C" bool symbol(void* notification, TimeValue time) {      \
    NAME(symbol);                                                   \
    const bool notified = Call<bool>(original, notification, time); \
    if (notified) __tsan_acquire(notification);                     \
    return notified;                                                \
  }
NOTIFIED_UNTIL(_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE)
NOTIFIED_UNTIL(_ZNK4absl7debian312Notification31WaitForNotificationWithDeadlineENS0_4TimeE)
