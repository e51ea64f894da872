// One call of the client library for Python: its buffers and its end.
#ifndef RINGATTN_CLIENT_PYTHON_PYTHON_CALL_H_
#define RINGATTN_CLIENT_PYTHON_PYTHON_CALL_H_

#include <pybind11/pybind11.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "client/api/client.h"

namespace ringattn::python {

// GPU memory, in place of an object with the buffer protocol among a call's inputs and outputs. The
// caller keeps it allocated until the call has ended.
struct CudaBytes {
  uint64_t address = 0;
  int64_t bytes = 0;
};

// Holds the memory of CudaBytes and of objects with the buffer protocol during its lifetime.
// Filling and destroying it needs the GIL.
class HeldBuffers {
 public:
  HeldBuffers() = default;
  HeldBuffers(const HeldBuffers&) = delete;
  HeldBuffers& operator=(const HeldBuffers&) = delete;
  ~HeldBuffers();

  // Throws Python's exception for an object without contiguous memory, or without writable memory.
  client::ConstBytes Read(pybind11::handle object);
  client::MutableBytes Write(pybind11::handle object);

 private:
  const Py_buffer& Hold(pybind11::handle object, int flags);
  client::MutableBytes HoldOnCuda(pybind11::handle object);

  std::vector<std::unique_ptr<Py_buffer>> held_;
  std::vector<pybind11::object> objects_;
};

// A client and the process that created it, because gRPC does not survive a fork.
class ClientHandle {
 public:
  explicit ClientHandle(std::unique_ptr<client::Client> client);
  // Cancels calls in flight and waits for them, without the GIL if this thread has it. In a forked
  // child it leaks the client instead.
  ~ClientHandle();

  client::Client& get() { return *client_; }
  bool is_of_this_process() const;

 private:
  std::unique_ptr<client::Client> client_;
  const int process_;
};

// Thread safe, except as stated. gRPC's threads never take the GIL: the end is signalled by a
// condition variable, and by an eventfd that an event loop can watch.
class PythonCall {
 public:
  // `request`: {"shape", "dtype", "output_dtype", "lse_format", "options", "plan"}, as the protos
  // name them; for a forward also "probability_rows", and for a backward "residual_handle" and
  // "keep_residual". `inputs`, `outputs`: tensor names to objects with the buffer protocol. `call`:
  // {"request_id", "deadline", "timeline", "traceparent", "crc32c", "transport", "retain",
  // "progress_interval", "writer"}. "retain" and "progress_interval" are in seconds; a retain of 0
  // means the service's default, and without an interval progress is not reported. Throws
  // pybind11::value_error naming a field; what HeldBuffers throws.
  static std::unique_ptr<PythonCall> Start(std::shared_ptr<ClientHandle> client, bool is_forward,
                                           const pybind11::dict& request,
                                           const pybind11::dict& inputs,
                                           const pybind11::dict& outputs,
                                           const pybind11::dict& call, bool with_event);
  // Cancels the call if it has not ended, and waits. Needs the GIL and releases it while waiting.
  ~PythonCall();

  const std::string& request_id() const { return pending_call_->request_id(); }
  void Cancel() { pending_call_->Cancel(); }

  // A descriptor that is readable when Poll has news and after the end; -1 without an event. Owned
  // by this object.
  int event() const;

  // Waits for progress that Poll has not returned, or the end. Releases the GIL. If a signal
  // handler raises (Ctrl-C), cancels the call, waits for its end, and raises. Needs the GIL.
  void Wait();

  // Returns (whether the call has ended, the newest Progress as a dict or None) without waiting.
  // After the end the buffers belong to the caller again. Needs the GIL.
  pybind11::tuple Poll();

  // Returns (report or None, error or None), as dicts. Requires that Poll has reported the end.
  // Needs the GIL.
  pybind11::tuple Result();

 private:
  struct End;

  PythonCall() = default;
  void WaitWithoutGil();

  std::shared_ptr<ClientHandle> client_;
  std::shared_ptr<End> end_;
  HeldBuffers buffers_;
  std::optional<client::PendingCall> pending_call_;
};

// Set the arguments without tensors from `request` of PythonCall::Start. Throw
// pybind11::value_error naming a field.
void FillForward(const pybind11::dict& request, client::ForwardArgs* args);
void FillBackward(const pybind11::dict& request, client::BackwardArgs* args);

// The accepted values of "transport".
std::vector<std::string> TransportNames();

// An error as a dict: code, message, reason, metadata, violations [(field, description)],
// retry_after or None.
pybind11::dict ErrorToDict(const absl::Status& status);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PYTHON_CALL_H_
