// The extension module ringattn._core: the client library with plain values. client/python/ringattn
// adds defaults, shapes, exceptions and event loops in Python.
#include <google/protobuf/descriptor.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/api/client.h"
#include "client/api/error.h"
#include "client/memory/cuda_device.h"
#include "client/python/dlpack.h"
#include "client/python/gil_released.h"
#include "client/python/proto_dict.h"
#include "client/python/python_call.h"
#include "client/python/python_kv.h"
#include "client/python/python_prepared.h"
#include "client/python/python_region.h"
#include "common/base/version.h"

namespace ringattn::python {
namespace {

namespace py = pybind11;

// The result form of all functions: (value, None) or (None, error).
py::tuple ValueOrError(const absl::Status& status, const py::object& value) {
  if (status.ok()) return py::make_tuple(value, py::none());
  return py::make_tuple(py::none(), ErrorToDict(status));
}

py::tuple Connect(const std::string& target, const py::dict& options) {
  client::ClientOptions client_options;
  double connect_timeout_seconds = absl::ToDoubleSeconds(client_options.retry.connect_timeout);
  ReadItem(options, "tls_ca", &client_options.tls_ca);
  ReadItem(options, "tls_cert", &client_options.tls_cert);
  ReadItem(options, "tls_key", &client_options.tls_key);
  ReadItem(options, "tls_server_name", &client_options.tls_server_name);
  ReadItem(options, "token_file", &client_options.token_file);
  ReadItem(options, "channels", &client_options.channels);
  ReadItem(options, "max_chunk_bytes_up", &client_options.max_chunk_bytes_up);
  ReadItem(options, "staging_bytes", &client_options.staging_bytes);
  ReadItem(options, "max_replays", &client_options.retry.max_replays);
  ReadItem(options, "connect_timeout", &connect_timeout_seconds);
  client_options.retry.connect_timeout = absl::Seconds(connect_timeout_seconds);
  auto made = [&] {
    const GilReleased released;
    return client::Client::Connect(target, client_options);
  }();
  if (!made.ok()) return ValueOrError(made.status(), py::none());
  return ValueOrError(absl::OkStatus(), py::cast(std::make_shared<ClientHandle>(*std::move(made))));
}

// Runs `call` without the GIL. Returns its message as a dict, or its error.
template <typename Call>
py::tuple Unary(const Call& call) {
  auto response = [&] {
    const GilReleased released;
    return call();
  }();
  if (!response.ok()) return ValueOrError(response.status(), py::none());
  return ValueOrError(absl::OkStatus(), ToDict(*response));
}

py::tuple Cancel(ClientHandle& client, const std::string& request_id, double deadline_seconds) {
  const absl::Status status = [&] {
    const GilReleased released;
    return client.get().Cancel(request_id, absl::Seconds(deadline_seconds));
  }();
  return ValueOrError(status, py::none());
}

py::tuple DeleteResidual(ClientHandle& client, const std::string& handle, double deadline_seconds) {
  const absl::Status status = [&] {
    const GilReleased released;
    return client.get().DeleteResidual(handle, absl::Seconds(deadline_seconds));
  }();
  return ValueOrError(status, py::none());
}

py::tuple RenewResiduals(ClientHandle& client, const std::vector<std::string>& handles,
                         double ttl_seconds, double deadline_seconds) {
  const auto reasons = [&] {
    const GilReleased released;
    return client.get().RenewResiduals(handles, absl::Seconds(ttl_seconds),
                                       absl::Seconds(deadline_seconds));
  }();
  if (!reasons.ok()) return ValueOrError(reasons.status(), py::none());
  return ValueOrError(absl::OkStatus(), py::cast(*reasons));
}

// These locks are held briefly, but the holder may be waiting for a core.
void HoldResiduals(ClientHandle& client, const std::vector<std::string>& handles) {
  const GilReleased released;
  client.get().HoldResiduals(handles);
}

void ReleaseResiduals(ClientHandle& client, const std::vector<std::string>& handles) {
  const GilReleased released;
  client.get().ReleaseResiduals(handles);
}

py::object HoldTrouble(ClientHandle& client) {
  const absl::Status trouble = [&] {
    const GilReleased released;
    return client.get().ResidualHoldTrouble();
  }();
  return trouble.ok() ? py::object(py::none()) : ErrorToDict(trouble);
}

// Returns the field names of a message of ringattn.v1. Throws if there is no such message.
std::vector<std::string> MessageFields(const std::string& name) {
  const google::protobuf::Descriptor* type =
      google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName("ringattn.v1." +
                                                                                name);
  if (type == nullptr) throw py::value_error("ringattn.v1." + name + " is not a message");
  std::vector<std::string> names;
  for (int i = 0; i < type->field_count(); ++i) names.push_back(type->field(i)->name());
  return names;
}

py::tuple AllocateRegion(ClientHandle& client, int64_t bytes) {
  auto region = PythonRegion::Allocate(client, bytes);
  if (!region.ok()) return ValueOrError(region.status(), py::none());
  return ValueOrError(absl::OkStatus(), py::cast(*region));
}

py::tuple AllocateCudaRegion(ClientHandle& client, int device, int64_t bytes) {
  auto region = PythonCudaRegion::Allocate(client, device, bytes);
  if (!region.ok()) return ValueOrError(region.status(), py::none());
  return ValueOrError(absl::OkStatus(), py::cast(*region));
}

// Runs `work(device)` without the GIL. Returns None, or its error.
template <typename Work>
py::object OnCuda(int device, const Work& work) {
  const absl::Status status = [&] {
    const GilReleased released;
    const auto found = client::CudaDevice::Get(device);
    return found.ok() ? work(**found) : found.status();
  }();
  return status.ok() ? py::object(py::none()) : ErrorToDict(status);
}

py::object CudaSynchronize(int device) {
  return OnCuda(device, [](const client::CudaDevice& cuda) { return cuda.Synchronize(); });
}

py::object CudaCopyToHost(int device, const py::buffer& host, uint64_t address) {
  HeldBuffers held;
  const client::MutableBytes to = held.Write(host);
  return OnCuda(device, [&](const client::CudaDevice& cuda) {
    return cuda.CopyToHost(to.data(), address, static_cast<int64_t>(to.size()));
  });
}

py::object CudaCopyFromHost(int device, uint64_t address, const py::buffer& host) {
  HeldBuffers held;
  const client::ConstBytes from = held.Read(host);
  return OnCuda(device, [&](const client::CudaDevice& cuda) {
    return cuda.CopyFromHost(address, from.data(), static_cast<int64_t>(from.size()));
  });
}

py::object CudaStartCopy(int device, uint64_t to, uint64_t from, int64_t bytes) {
  return OnCuda(device,
                [&](const client::CudaDevice& cuda) { return cuda.StartCopy(to, from, bytes); });
}

void DefineCuda(py::module_& module) {
  py::class_<CudaBytes>(module, "CudaBytes")
      .def(py::init([](uint64_t address, int64_t bytes) {
        return CudaBytes{address, bytes};
      }))
      .def_readonly("nbytes", &CudaBytes::bytes);
  py::class_<PythonCudaRegion, std::shared_ptr<PythonCudaRegion>>(module, "CudaRegion")
      .def_property_readonly("address", &PythonCudaRegion::address)
      .def_property_readonly("nbytes", &PythonCudaRegion::bytes)
      .def_property_readonly("device", &PythonCudaRegion::device)
      .def_property_readonly("workers", &PythonCudaRegion::workers)
      .def_property_readonly("trouble", &PythonCudaRegion::trouble);
  py::class_<DlpackTensor>(module, "DlpackTensor")
      .def(py::init<const py::capsule&>())
      .def_property_readonly("address", &DlpackTensor::address)
      .def_property_readonly("device_type", &DlpackTensor::device_type)
      .def_property_readonly("device", &DlpackTensor::device)
      .def_property_readonly("shape", &DlpackTensor::shape)
      .def_property_readonly("is_contiguous", &DlpackTensor::is_contiguous)
      .def_property_readonly("dtype", &DlpackTensor::dtype);
  module.def("make_cuda_dlpack", &MakeCudaDlpack);
  module.def("cuda_synchronize", &CudaSynchronize);
  module.def("cuda_copy_to_host", &CudaCopyToHost);
  module.def("cuda_copy_from_host", &CudaCopyFromHost);
  module.def("cuda_start_copy", &CudaStartCopy);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ client library of ringattn. Use the package ringattn.";
  module.attr("VERSION") = kVersion;
  module.attr("TRANSPORTS") = py::tuple(py::cast(TransportNames()));

  py::class_<PythonRegion, std::shared_ptr<PythonRegion>>(module, "Region")
      .def_property_readonly("address", &PythonRegion::address)
      .def_property_readonly("nbytes", &PythonRegion::bytes)
      .def_property_readonly("closed", &PythonRegion::closed)
      .def_property_readonly("workers", &PythonRegion::workers)
      .def_property_readonly("trouble", &PythonRegion::trouble)
      .def("close", &PythonRegion::Close);

  py::class_<ClientHandle, std::shared_ptr<ClientHandle>> client(module, "Client");
  client
      .def("start", &PythonCall::Start, py::arg("is_forward"), py::arg("request"),
           py::arg("inputs"), py::arg("outputs"), py::arg("call"), py::arg("with_event"))
      .def("prepare", &PythonPrepared::Prepare, py::arg("is_forward"), py::arg("request"),
           py::arg("inputs"), py::arg("ttl"), py::arg("deadline"))
      .def("server_info",
           [](ClientHandle& client, double deadline) {
             return Unary([&] { return client.get().GetServerInfo(absl::Seconds(deadline)); });
           })
      .def("topology",
           [](ClientHandle& client, double deadline) {
             return Unary([&] { return client.get().GetTopology(absl::Seconds(deadline)); });
           })
      .def("get_operation",
           [](ClientHandle& client, const std::string& request_id, double deadline) {
             return Unary(
                 [&] { return client.get().GetStatus(request_id, absl::Seconds(deadline)); });
           })
      .def("cancel_operation", &Cancel)
      .def("delete_residual", &DeleteResidual)
      .def("renew_residuals", &RenewResiduals)
      .def("hold_residuals", &HoldResiduals)
      .def("release_residuals", &ReleaseResiduals)
      .def("hold_trouble", &HoldTrouble)
      .def("allocate_region", &AllocateRegion)
      .def("allocate_cuda_region", &AllocateCudaRegion);

  py::class_<PythonCall>(module, "Call")
      .def_property_readonly("request_id", &PythonCall::request_id)
      .def("fileno", &PythonCall::event)
      .def("cancel", &PythonCall::Cancel)
      .def("wait", &PythonCall::Wait)
      .def("poll", &PythonCall::Poll)
      .def("result", &PythonCall::Result);

  py::class_<PythonPrepared>(module, "Prepared")
      .def_property_readonly("report", &PythonPrepared::report)
      .def_property_readonly("closed", &PythonPrepared::closed)
      .def("trouble", &PythonPrepared::Trouble)
      .def("close", &PythonPrepared::Close);

  DefineKvCache(module, client);
  DefineCuda(module);
  module.def("connect", &Connect, py::arg("target"), py::arg("options"));
  module.def("message_fields", &MessageFields, py::arg("name"));
}

}  // namespace ringattn::python
