#include "client/python/python_kv.h"

#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "client/python/gil_released.h"
#include "client/python/proto_dict.h"

namespace ringattn::python {
namespace {

namespace py = pybind11;

py::object ErrorOrNone(const absl::Status& status) {
  return status.ok() ? py::object(py::none()) : ErrorToDict(status);
}

py::tuple ErrorPair(const absl::Status& status) {
  return py::make_tuple(py::none(), ErrorToDict(status));
}

// Checks for signals while a call waits without the GIL.
class SignalCheck {
 public:
  client::KvCallOptions OptionsOf(double deadline_seconds) {
    client::KvCallOptions options;
    options.deadline = absl::Seconds(deadline_seconds);
    options.interrupted = [this] {
      const GilTaken acquired;  // stops here while the interpreter ends
      if (PyErr_CheckSignals() == 0) return false;
      raised_.emplace();  // takes the pending exception
      return true;
    };
    return options;
  }
  // Raises the exception of a signal handler. Needs the GIL.
  void Rethrow() {
    if (!raised_.has_value()) return;
    py::error_already_set raised = std::move(*raised_);
    raised_.reset();
    throw raised;
  }

 private:
  std::optional<py::error_already_set> raised_;
};

client::KvOpenOptions OpenOptionsOf(const py::dict& options) {
  client::KvOpenOptions open;
  std::string transport = "auto";
  double deadline_seconds = absl::ToDoubleSeconds(open.deadline);
  double recovery_seconds = absl::ToDoubleSeconds(open.recovery_time);
  ReadItem(options, "transport", &transport);
  ReadItem(options, "hold", &open.hold);
  ReadItem(options, "deadline", &deadline_seconds);
  ReadItem(options, "recovery_time", &recovery_seconds);
  ReadItem(options, "answered_step", &open.answered_step);
  open.deadline = absl::Seconds(deadline_seconds);
  open.recovery_time = absl::Seconds(recovery_seconds);
  if (transport == "relay") {
    open.transport = client::TransportPreference::kRelay;
  } else if (transport == "direct") {
    open.transport = client::TransportPreference::kDirect;
  } else if (transport == "host_memory") {
    open.transport = client::TransportPreference::kHostMemory;
  } else if (transport != "auto") {
    throw py::value_error(
        absl::StrCat("transport is \"", transport, "\"; use auto, host_memory, direct or relay"));
  }
  return open;
}

client::KvCreateOptions CreateOptionsOf(const py::dict& options) {
  client::KvCreateOptions create;
  double ttl_seconds = 0;
  double deadline_seconds = absl::ToDoubleSeconds(create.deadline);
  uint32_t world_size = 0;
  ReadItem(options, "request_id", &create.request_id);
  ReadItem(options, "ttl", &ttl_seconds);
  ReadItem(options, "world_size", &world_size);
  ReadItem(options, "members", &create.members);
  ReadItem(options, "deadline", &deadline_seconds);
  create.ttl = absl::Seconds(ttl_seconds);
  create.deadline = absl::Seconds(deadline_seconds);
  if (world_size > 0) create.world_size = world_size;
  if (options.contains("divide_blocks") && !options["divide_blocks"].is_none()) {
    create.divide_blocks = options["divide_blocks"].cast<bool>();
  }
  return create;
}

// Runs `wait(options)`, which returns a status, without the GIL.
template <typename Wait>
py::object WaitFor(double deadline_seconds, const Wait& wait) {
  SignalCheck signals;
  const client::KvCallOptions options = signals.OptionsOf(deadline_seconds);
  const absl::Status status = [&] {
    const GilReleased released;
    return wait(options);
  }();
  signals.Rethrow();
  return ErrorOrNone(status);
}

}  // namespace

py::tuple PythonKvCache::Wrap(std::shared_ptr<ClientHandle> client,
                              absl::StatusOr<std::unique_ptr<client::KvCache>> cache) {
  if (!cache.ok()) return ErrorPair(cache.status());
  std::shared_ptr<PythonKvCache> made(new PythonKvCache(std::move(client), *std::move(cache)));
  return py::make_tuple(py::cast(made), py::none());
}

py::tuple PythonKvCache::Create(std::shared_ptr<ClientHandle> client, const py::dict& spec,
                                const py::dict& options) {
  v1::KvCacheSpec message;
  FromDict(spec, "spec", &message);
  const client::KvCreateOptions create = CreateOptionsOf(options);
  const client::KvOpenOptions open = OpenOptionsOf(options);
  auto cache = [&] {
    const GilReleased released;
    return client::KvCache::Create(&client->get(), message, create, open);
  }();
  return Wrap(std::move(client), std::move(cache));
}

py::tuple PythonKvCache::Open(std::shared_ptr<ClientHandle> client, const py::bytes& cache_id,
                              const py::dict& options) {
  const std::string id = cache_id;
  const client::KvOpenOptions open = OpenOptionsOf(options);
  auto cache = [&] {
    const GilReleased released;
    return client::KvCache::Open(&client->get(), id, open);
  }();
  return Wrap(std::move(client), std::move(cache));
}

py::tuple PythonKvCache::List(ClientHandle& client, double deadline_seconds) {
  const auto caches = [&] {
    const GilReleased released;
    return client::KvCache::List(&client.get(), absl::Seconds(deadline_seconds));
  }();
  if (!caches.ok()) return ErrorPair(caches.status());
  py::list list;
  for (const v1::KvCacheInfo& cache : *caches) list.append(ToDict(cache));
  return py::make_tuple(list, py::none());
}

py::tuple PythonKvCache::Delete(ClientHandle& client, const py::bytes& cache_id,
                                double deadline_seconds) {
  const std::string id = cache_id;
  const absl::Status status = [&] {
    const GilReleased released;
    return client::KvCache::Delete(&client.get(), id, absl::Seconds(deadline_seconds));
  }();
  return py::make_tuple(py::none(), ErrorOrNone(status));
}

PythonKvCache::~PythonKvCache() {
  if (!client_->is_of_this_process()) {
    static_cast<void>(cache_.release());
  } else if (PyGILState_Check()) {
    const GilReleased released;
    cache_.reset();
  }
}

py::dict PythonKvCache::spec() const { return ToDict(cache_->spec()); }
py::dict PythonKvCache::placement() const { return ToDict(cache_->placement()); }

// These wait for a call in progress.
uint64_t PythonKvCache::epoch() const {
  const GilReleased released;
  return cache_->epoch();
}
std::string PythonKvCache::transport() const {
  const GilReleased released;
  switch (cache_->transport()) {
    case v1::TRANSPORT_HOST_MEMORY:
      return "host_memory";
    case v1::TRANSPORT_DIRECT:
      return "direct";
    default:
      return "relay";
  }
}
std::string PythonKvCache::transport_reason() const {
  const GilReleased released;
  return cache_->transport_reason();
}
uint64_t PythonKvCache::step() const {
  const GilReleased released;
  return cache_->step();
}
uint64_t PythonKvCache::blocks_free() const {
  const GilReleased released;
  return cache_->blocks_free();
}

bool PythonKvCache::leaving() const {
  const GilReleased released;
  return cache_->leaving();
}

py::dict PythonKvCache::sequences() const {
  const auto sequences = [this] {
    const GilReleased released;
    return cache_->sequences();
  }();
  py::dict lengths;
  for (const auto& [id, length] : sequences) lengths[py::int_(id)] = length;
  return lengths;
}

py::dict PythonKvCache::refusal() const {
  const v1::StepRefused refusal = [this] {
    const GilReleased released;
    return cache_->refusal();
  }();
  return ToDict(refusal);
}

py::object PythonKvCache::Begin(const py::dict& begin) {
  v1::StepBegin message;
  FromDict(begin, "step", &message);
  const absl::Status status = [&] {
    const GilReleased released;
    return cache_->BeginStep(message);
  }();
  return ErrorOrNone(status);
}

py::tuple PythonKvCache::Call(uint32_t layer, const std::string& output, const py::object& q,
                              const py::object& k, const py::object& v, const py::object& out,
                              const py::object& lse, double deadline_seconds) {
  client::KvLayerArgs args;
  args.layer = layer;
  args.output = static_cast<v1::KvOutput>(EnumNumber(*v1::KvOutput_descriptor(), output, "output"));
  HeldBuffers held;
  if (!q.is_none()) args.q = held.Read(q);
  if (!k.is_none()) args.k = held.Read(k);
  if (!v.is_none()) args.v = held.Read(v);
  client::KvLayerResults results;
  if (!out.is_none()) results.out = held.Write(out);
  if (!lse.is_none()) results.lse = held.Write(lse);
  SignalCheck signals;
  const client::KvCallOptions options = signals.OptionsOf(deadline_seconds);
  const auto report = [&] {
    const GilReleased released;
    return cache_->CallLayer(args, results, options);
  }();
  signals.Rethrow();
  if (!report.ok()) return ErrorPair(report.status());
  py::dict values;
  values["device_time"] = absl::ToDoubleSeconds(report->device_time);
  values["sent_bytes"] = report->sent_bytes;
  values["received_bytes"] = report->received_bytes;
  return py::make_tuple(values, py::none());
}

py::object PythonKvCache::Commit(double deadline_seconds) {
  return WaitFor(deadline_seconds, [this](const client::KvCallOptions& options) {
    return cache_->CommitStep(options);
  });
}

py::object PythonKvCache::RunCommands(const py::list& commands, double deadline_seconds) {
  std::vector<v1::KvCommand> messages;
  for (const py::handle command : commands) {
    FromDict(py::reinterpret_borrow<py::dict>(command),
             absl::StrCat("commands[", messages.size(), "]"), &messages.emplace_back());
  }
  return WaitFor(deadline_seconds, [&](const client::KvCallOptions& options) {
    return cache_->RunCommands(messages, options);
  });
}

py::object PythonKvCache::RoundTrip(double deadline_seconds) {
  return WaitFor(deadline_seconds, [this](const client::KvCallOptions& options) {
    return cache_->RoundTrip(options);
  });
}

void PythonKvCache::Close() {
  const GilReleased released;
  cache_->Close();
}

py::object PythonKvCache::DeleteCache(double deadline_seconds) {
  const absl::Status status = [&] {
    const GilReleased released;
    return cache_->Delete(absl::Seconds(deadline_seconds));
  }();
  return ErrorOrNone(status);
}

void DefineKvCache(py::module_& module,
                   py::class_<ClientHandle, std::shared_ptr<ClientHandle>>& client) {
  py::class_<PythonKvCache, std::shared_ptr<PythonKvCache>>(module, "KvCache")
      .def_property_readonly("id", &PythonKvCache::id)
      .def_property_readonly("spec", &PythonKvCache::spec)
      .def_property_readonly("placement", &PythonKvCache::placement)
      .def_property_readonly("epoch", &PythonKvCache::epoch)
      .def_property_readonly("transport", &PythonKvCache::transport)
      .def_property_readonly("transport_reason", &PythonKvCache::transport_reason)
      .def_property_readonly("bytes_per_worker", &PythonKvCache::bytes_per_worker)
      .def_property_readonly("sequences", &PythonKvCache::sequences)
      .def_property_readonly("step", &PythonKvCache::step)
      .def_property_readonly("blocks_free", &PythonKvCache::blocks_free)
      .def_property_readonly("leaving", &PythonKvCache::leaving)
      .def_property_readonly("refusal", &PythonKvCache::refusal)
      .def("begin", &PythonKvCache::Begin)
      .def("call", &PythonKvCache::Call)
      .def("commit", &PythonKvCache::Commit)
      .def("run_commands", &PythonKvCache::RunCommands)
      .def("round_trip", &PythonKvCache::RoundTrip)
      .def("close", &PythonKvCache::Close)
      .def("delete", &PythonKvCache::DeleteCache);
  client.def("create_cache", &PythonKvCache::Create)
      .def("open_cache", &PythonKvCache::Open)
      .def("list_caches", &PythonKvCache::List)
      .def("delete_cache", &PythonKvCache::Delete);
}

}  // namespace ringattn::python
