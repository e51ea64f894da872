// The interpreter's lock given up for a while.
#ifndef RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_
#define RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_

#include <Python.h>

#include <chrono>
#include <thread>

namespace ringattn::python {

// Gives up the lock for as long as it lives. Needs the lock. Where the interpreter ends meanwhile
// in another thread, this one sleeps for good: before Python 3.14 taking the lock would then end
// the thread by unwinding its stack, which C++ answers with std::terminate (pybind11's
// gil_scoped_release does).
class GilReleased {
 public:
  GilReleased() : is_last_thread_(IsFinalizing()), state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    while (!is_last_thread_ && IsFinalizing()) std::this_thread::sleep_for(std::chrono::hours(1));
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  static bool IsFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
  }

  // Who has the lock while the interpreter ends is the thread that ends it.
  const bool is_last_thread_;
  PyThreadState* const state_;
};

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_GIL_RELEASED_H_
