// One call of the client library for Python: the buffers that it reads and writes, and its end.
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

// Memory on a GPU: in a call's inputs and outputs it stands where others have the buffer protocol.
// What keeps the memory is the caller's, until the call has ended.
struct CudaBytes {
  uint64_t address = 0;
  int64_t bytes = 0;
};

// The memory of CudaBytes and of objects with the buffer protocol, for as long as this lives. Needs
// the GIL to be filled and to go.
class HeldBuffers {
 public:
  HeldBuffers() = default;
  HeldBuffers(const HeldBuffers&) = delete;
  HeldBuffers& operator=(const HeldBuffers&) = delete;
  ~HeldBuffers();

  // Throws: what Python says of an object without contiguous memory, or without writable memory.
  client::ConstBytes Read(pybind11::handle object);
  client::MutableBytes Write(pybind11::handle object);

 private:
  const Py_buffer& Hold(pybind11::handle object, int flags);
  client::MutableBytes HoldOnCuda(pybind11::handle object);

  std::vector<std::unique_ptr<Py_buffer>> held_;
  std::vector<pybind11::object> objects_;
};

// A client and the process that made it: gRPC does not survive a fork.
class ClientHandle {
 public:
  explicit ClientHandle(std::unique_ptr<client::Client> client);
  // Cancels what is in flight and waits for it, without the GIL if this thread has it. In a forked
  // child nothing is touched: the client is leaked.
  ~ClientHandle();

  client::Client& get() { return *client_; }
  bool is_of_this_process() const;

 private:
  std::unique_ptr<client::Client> client_;
  const int process_;
};

// Thread safe but for what is said. gRPC's threads never take the GIL: an end is signalled by a
// condition variable, and by an eventfd that an event loop can watch.
class PythonCall {
 public:
  // `request`: {"shape", "dtype", "output_dtype", "lse_format", "options", "plan"}, as the protos
  // name them, of a forward "probability_rows", and of a backward "residual_handle",
  // "keep_residual". `inputs`, `outputs`: tensors' names to
  // objects with the buffer protocol. `call`: {"request_id", "deadline", "timeline",
  // "traceparent", "crc32c", "transport", "retain", "progress_interval"}, the last two in seconds:
  // retain 0 for as long as the service thinks right, no interval for no progress. Throws:
  // pybind11::value_error naming a field; what HeldBuffers throws.
  static std::unique_ptr<PythonCall> Start(std::shared_ptr<ClientHandle> client, bool is_forward,
                                           const pybind11::dict& request,
                                           const pybind11::dict& inputs,
                                           const pybind11::dict& outputs,
                                           const pybind11::dict& call, bool with_event);
  // Cancels and waits if it has not ended. Needs the GIL, gives it up while it waits.
  ~PythonCall();

  const std::string& request_id() const { return operation_->request_id(); }
  void Cancel() { operation_->Cancel(); }

  // Readable when Poll has news, and from the end on; -1 without an event. This object's own.
  int event() const;

  // Until there is progress that Poll has not given, or the end. Gives up the GIL. A signal whose
  // handler raises (Ctrl-C) cancels the call, waits for its end, and raises. Needs the GIL.
  void Wait();

  // (whether the call has ended, the newest Progress as a dict or None). After its end buffers are
  // the caller's again. Does not wait for either. Needs the GIL.
  pybind11::tuple Poll();

  // (report or None, error or None), dicts. REQUIRES: Poll has told of the end. Needs the GIL.
  pybind11::tuple Result();

 private:
  struct End;

  PythonCall() = default;
  void WaitWithoutGil();

  std::shared_ptr<ClientHandle> client_;
  std::shared_ptr<End> end_;
  HeldBuffers buffers_;
  std::optional<client::Operation> operation_;
};

// What "transport" may be.
std::vector<std::string> TransportNames();

// An error as a dict: code, message, reason, metadata, violations [(field, description)],
// retry_after or None.
pybind11::dict ErrorToDict(const absl::Status& status);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PYTHON_CALL_H_
