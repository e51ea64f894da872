#include "client/python/python_prepared.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/python/gil_released.h"
#include "client/python/proto_dict.h"

namespace ringattn::python {
namespace {

namespace py = pybind11;

bool Has(const std::vector<std::string>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

py::tuple PythonPrepared::Prepare(std::shared_ptr<ClientHandle> client, bool is_forward,
                                  const py::dict& request, const std::vector<std::string>& inputs,
                                  double ttl_seconds, double deadline_seconds) {
  client::ForwardArgs forward;
  client::BackwardArgs backward;
  if (is_forward) {
    FillForward(request, &forward);
  } else {
    FillBackward(request, &backward);
    backward.has_forward_result = Has(inputs, "lse");
    if (Has(inputs, "dlse")) backward.more[v1::TENSOR_ID_DLSE] = {};
  }
  const client::PrepareOptions options{.ttl = absl::Seconds(ttl_seconds),
                                       .deadline = absl::Seconds(deadline_seconds)};
  absl::StatusOr<client::PreparedCall> made = [&] {
    const GilReleased released;
    client::Client& library = client->get();
    return is_forward ? library.Prepare(forward, options) : library.Prepare(backward, options);
  }();
  if (!made.ok()) return py::make_tuple(py::none(), ErrorToDict(made.status()));
  std::unique_ptr<PythonPrepared> prepared(new PythonPrepared(*std::move(made)));
  return py::make_tuple(py::cast(std::move(prepared)), py::none());
}

PythonPrepared::PythonPrepared(client::PreparedCall call) : call_(std::move(call)) {
  report_["accepted"] = ToDict(call_->report().accepted);
  report_["summary"] = ToDict(call_->report().summary);
}

py::object PythonPrepared::Trouble() const {
  const absl::Status trouble = call_.has_value() ? call_->trouble() : absl::OkStatus();
  return trouble.ok() ? py::object(py::none()) : ErrorToDict(trouble);
}

}  // namespace ringattn::python
