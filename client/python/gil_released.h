// Scopes that release or take the interpreter's lock (GIL).
#ifndef RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_
#define RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_

#include <Python.h>
#include <cxxabi.h>

#include <chrono>
#include <thread>

namespace ringattn::python {

// Returns whether the interpreter is ending. Needs no lock.
inline bool IsFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Runs `take`, which takes the GIL. While the interpreter ends, CPython before 3.14 answers every
// other thread that takes the GIL with pthread_exit. That unwinds the stack, reaches a destructor,
// and the process aborts. Here the thread stops for good instead, and the process ends without it.
template <typename Take>
void TakeGilOrStop(const Take& take) {
  try {
    take();
  } catch (const abi::__forced_unwind&) {
    // Leaving this handler would resume the unwinding.
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Releases the GIL during its lifetime. The thread must hold the GIL.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    TakeGilOrStop([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* const state_;
};

// Holds the GIL during its lifetime, on any thread. The interpreter must not have ended.
class GilTaken {
 public:
  GilTaken() {
    TakeGilOrStop([this] { state_ = PyGILState_Ensure(); });
  }
  ~GilTaken() { PyGILState_Release(state_); }
  GilTaken(const GilTaken&) = delete;
  GilTaken& operator=(const GilTaken&) = delete;

 private:
  PyGILState_STATE state_ = PyGILState_UNLOCKED;
};

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_
