#include "client/python/python_call.h"

#include <google/protobuf/descriptor.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/python/gil_released.h"
#include "client/python/proto_dict.h"

namespace ringattn::python {
namespace {

namespace py = pybind11;

// How long Ctrl-C may go unnoticed.
constexpr auto kSignalCheckInterval = std::chrono::milliseconds(50);

v1::TensorId TensorNamed(const std::string& name) {
  return static_cast<v1::TensorId>(EnumNumber(*v1::TensorId_descriptor(), name, "tensor"));
}

template <typename Message>
void Fill(const py::dict& request, const char* name, Message* message) {
  if (request.contains(name)) FromDict(request[name], name, message);
}

// Returns an enum value of the protos by its short name; 0 (unspecified) if there is none.
template <typename Enum>
Enum EnumOf(const py::dict& request, const char* name,
            const google::protobuf::EnumDescriptor* type) {
  if (!request.contains(name) || request[name].is_none()) return static_cast<Enum>(0);
  return static_cast<Enum>(EnumNumber(*type, ReadValue<std::string>(request[name], name), name));
}

template <typename Args>
void FillHeader(const py::dict& request, Args* args) {
  Fill(request, "shape", &args->shape);
  Fill(request, "options", &args->options);
  Fill(request, "plan", &args->plan);
  args->dtype = EnumOf<v1::DataType>(request, "dtype", v1::DataType_descriptor());
  args->output_dtype = EnumOf<v1::DataType>(request, "output_dtype", v1::DataType_descriptor());
  args->lse_format = EnumOf<v1::LseFormat>(request, "lse_format", v1::LseFormat_descriptor());
}

void FillProbabilityRows(const py::dict& request, client::ForwardArgs* args) {
  if (!request.contains("probability_rows")) return;
  int index = 0;
  for (const py::handle row : request["probability_rows"]) {
    FromDict(py::reinterpret_borrow<py::dict>(row), absl::StrCat("probability_rows[", index++, "]"),
             &args->probability_rows.emplace_back());
  }
}

// The transports by their Python names.
const std::map<std::string, client::TransportPreference>& Transports() {
  static const auto* const transports = new std::map<std::string, client::TransportPreference>{
      {"auto", client::TransportPreference::kAuto},
      {"relay", client::TransportPreference::kRelay},
      {"direct", client::TransportPreference::kDirect},
      {"host_memory", client::TransportPreference::kHostMemory},
      {"cuda_memory", client::TransportPreference::kCudaMemory},
  };
  return *transports;
}

client::CallOptions CallOptionsOf(const py::dict& call) {
  client::CallOptions options;
  double deadline_seconds = std::numeric_limits<double>::infinity();
  std::string transport = "auto";
  double retain_seconds = -1;
  ReadItem(call, "transport", &transport);
  ReadItem(call, "retain", &retain_seconds);
  const auto wish = Transports().find(transport);
  if (wish == Transports().end()) {
    throw py::value_error(absl::StrCat("transport: \"", transport, "\" is not supported"));
  }
  options.transport = wish->second;
  // A transport that the caller names is required.
  options.transport_required =
      transport != "auto" && options.transport != client::TransportPreference::kRelay;
  if (retain_seconds >= 0) options.retain = absl::Seconds(retain_seconds);
  ReadItem(call, "request_id", &options.request_id);
  ReadItem(call, "timeline", &options.with_timeline);
  ReadItem(call, "traceparent", &options.traceparent);
  ReadItem(call, "crc32c", &options.with_crc32c);
  ReadItem(call, "deadline", &deadline_seconds);
  if (call.contains("writer") && !call["writer"].is_none()) {
    FromDict(call["writer"], "writer", &options.writer.emplace());
  }
  options.deadline = absl::Seconds(deadline_seconds);
  return options;
}

}  // namespace

void FillForward(const py::dict& request, client::ForwardArgs* args) {
  FillHeader(request, args);
  FillProbabilityRows(request, args);
}

void FillBackward(const py::dict& request, client::BackwardArgs* args) {
  FillHeader(request, args);
  ReadItem(request, "residual_handle", &args->residual_handle);
  ReadItem(request, "keep_residual", &args->keep_residual);
}

std::vector<std::string> TransportNames() {
  std::vector<std::string> names;
  for (const auto& [name, wish] : Transports()) names.push_back(name);
  return names;
}

HeldBuffers::~HeldBuffers() {
  for (const auto& buffer : held_) PyBuffer_Release(buffer.get());
}

const Py_buffer& HeldBuffers::Hold(py::handle object, int flags) {
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), flags) != 0) throw py::error_already_set();
  held_.push_back(std::move(buffer));
  return *held_.back();
}

client::MutableBytes HeldBuffers::HoldOnCuda(py::handle object) {
  const auto& bytes = object.cast<const CudaBytes&>();
  objects_.push_back(py::reinterpret_borrow<py::object>(object));
  return {reinterpret_cast<uint8_t*>(bytes.address), static_cast<size_t>(bytes.bytes)};
}

client::ConstBytes HeldBuffers::Read(py::handle object) {
  if (py::isinstance<CudaBytes>(object)) return HoldOnCuda(object);
  const Py_buffer& buffer = Hold(object, PyBUF_SIMPLE);
  return {static_cast<const uint8_t*>(buffer.buf), static_cast<size_t>(buffer.len)};
}

client::MutableBytes HeldBuffers::Write(py::handle object) {
  if (py::isinstance<CudaBytes>(object)) return HoldOnCuda(object);
  const Py_buffer& buffer = Hold(object, PyBUF_WRITABLE);
  return {static_cast<uint8_t*>(buffer.buf), static_cast<size_t>(buffer.len)};
}

ClientHandle::ClientHandle(std::unique_ptr<client::Client> client)
    : client_(std::move(client)), process_(getpid()) {}

bool ClientHandle::is_of_this_process() const { return getpid() == process_; }

ClientHandle::~ClientHandle() {
  if (!is_of_this_process()) {
    static_cast<void>(client_.release());
  } else if (PyGILState_Check()) {
    const GilReleased released;
    client_.reset();
  }
}

// Outlives the PythonCall if the client library's callback is late.
struct PythonCall::End {
  std::mutex mutex;
  std::condition_variable changed;
  bool has_come = false;
  std::optional<v1::Progress> progress;  // the newest that was not taken
  int event = -1;

  ~End() {
    if (event >= 0) close(event);
  }

  void Come() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      has_come = true;
    }
    Signal();
  }

  void Tell(const v1::Progress& news) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      progress = news;
    }
    Signal();
  }

  void Signal() {
    changed.notify_all();
    const uint64_t one = 1;
    // The counter is far from its maximum, so the write neither blocks nor fails.
    if (event >= 0) static_cast<void>(write(event, &one, sizeof(one)) == 0);
  }
};

std::unique_ptr<PythonCall> PythonCall::Start(std::shared_ptr<ClientHandle> client, bool is_forward,
                                              const py::dict& request, const py::dict& inputs,
                                              const py::dict& outputs, const py::dict& call,
                                              bool with_event) {
  std::unique_ptr<PythonCall> made(new PythonCall);
  made->client_ = std::move(client);
  made->end_ = std::make_shared<End>();
  if (with_event) {
    made->end_->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made->end_->event < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  client::CallOptions options = CallOptionsOf(call);
  double progress_seconds = 0;
  ReadItem(call, "progress_interval", &progress_seconds);
  if (progress_seconds > 0) {
    options.progress_interval = absl::Seconds(progress_seconds);
    options.on_progress = [end = made->end_](const v1::Progress& progress) { end->Tell(progress); };
  }
  const client::Client::Done done = [end = made->end_](const client::CallResult&) { end->Come(); };
  HeldBuffers& held = made->buffers_;

  client::ForwardArgs forward;
  client::ForwardResults results;
  client::BackwardArgs backward;
  client::BackwardResults gradients;
  for (const auto& [key, value] : inputs) {
    const auto name = key.cast<std::string>();
    const client::ConstBytes bytes = held.Read(value);
    const auto place = [&](auto* args) -> client::ConstBytes& {
      if (name == "q") return args->q;
      if (name == "k") return args->k;
      if (name == "v") return args->v;
      return args->more[TensorNamed(name)];
    };
    if (is_forward) {
      place(&forward) = bytes;
    } else if (name == "dout") {
      backward.dout = bytes;
    } else if (name == "out" || name == "lse") {
      backward.has_forward_result = true;
      (name == "out" ? backward.out : backward.lse) = bytes;
    } else {
      place(&backward) = bytes;
    }
  }
  for (const auto& [key, value] : outputs) {
    const auto name = key.cast<std::string>();
    const client::MutableBytes bytes = held.Write(value);
    if (is_forward) {
      (name == "out"   ? results.out
       : name == "lse" ? results.lse
                       : results.more[TensorNamed(name)]) = bytes;
    } else if (name == "dq" || name == "dk" || name == "dv") {
      (name == "dq" ? gradients.dq : name == "dk" ? gradients.dk : gradients.dv) = bytes;
    } else {
      gradients.more[TensorNamed(name)] = bytes;
    }
  }
  if (is_forward) {
    FillForward(request, &forward);
  } else {
    FillBackward(request, &backward);
  }
  const GilReleased released;
  client::Client& library = made->client_->get();
  made->pending_call_.emplace(is_forward
                                  ? library.StartForward(forward, results, options, done)
                                  : library.StartBackward(backward, gradients, options, done));
  return made;
}

PythonCall::~PythonCall() {
  // A forked child can neither end nor await the call, which belongs to the parent.
  if (client_ == nullptr || !pending_call_ || !client_->is_of_this_process()) return;
  pending_call_->Cancel();
  WaitWithoutGil();
}

int PythonCall::event() const { return end_->event; }

void PythonCall::WaitWithoutGil() {
  const GilReleased released;
  static_cast<void>(pending_call_->Wait());
}

void PythonCall::Wait() {
  const auto wait_a_while = [this] {
    const GilReleased released;
    std::unique_lock<std::mutex> lock(end_->mutex);
    return end_->changed.wait_for(lock, kSignalCheckInterval,
                                  [this] { return end_->has_come || end_->progress.has_value(); });
  };
  while (!wait_a_while()) {
    if (PyErr_CheckSignals() == 0) continue;
    // Save the pending exception, because other code may run before it is raised.
    py::error_already_set raised;
    pending_call_->Cancel();
    WaitWithoutGil();
    throw raised;
  }
}

py::tuple PythonCall::Poll() {
  std::optional<v1::Progress> progress;
  bool has_come = false;
  {
    const std::lock_guard<std::mutex> lock(end_->mutex);
    has_come = end_->has_come;
    progress.swap(end_->progress);
    uint64_t count = 0;
    // Leave the eventfd readable after the end.
    if (end_->event >= 0 && !has_come) {
      static_cast<void>(read(end_->event, &count, sizeof(count)) == 0);
    }
  }
  if (has_come) WaitWithoutGil();
  return py::make_tuple(has_come, progress ? py::object(ToDict(*progress)) : py::none());
}

py::tuple PythonCall::Result() {
  client::CallResult result = [this] {
    const GilReleased released;
    return pending_call_->Wait();
  }();
  if (!result.ok()) return py::make_tuple(py::none(), ErrorToDict(result.status()));
  py::dict report;
  report["request_id"] = request_id();
  report["accepted"] = ToDict(result->accepted);
  report["summary"] = ToDict(result->summary);
  report["transport_reason"] = result->transport_reason;
  report["staged_bytes"] = result->staged_bytes;
  report["residual_failure"] = result->residual_failure;
  py::dict times;
  times["accepted"] = result->times.accepted_seconds;
  times["uploaded"] = result->times.uploaded_seconds;
  times["first_output"] = result->times.first_output_seconds;
  times["finished"] = result->times.finished_seconds;
  report["times"] = times;
  return py::make_tuple(report, py::none());
}

py::dict ErrorToDict(const absl::Status& status) {
  const client::ErrorDetails details = client::DetailsOf(status);
  py::list violations;
  for (const client::FieldViolation& violation : details.violations) {
    violations.append(py::make_tuple(violation.field, violation.description));
  }
  py::dict metadata;
  for (const auto& [name, value] : details.metadata) metadata[py::str(name)] = value;
  py::dict error;
  error["code"] = absl::AsciiStrToUpper(absl::StatusCodeToString(status.code()));
  error["message"] = std::string(status.message());
  error["reason"] = details.reason;
  error["metadata"] = metadata;
  error["violations"] = violations;
  error["retry_after"] = py::none();
  if (details.retry_delay) error["retry_after"] = absl::ToDoubleSeconds(*details.retry_delay);
  return error;
}

}  // namespace ringattn::python
