// Prepared calls for Python.
// Tests: tests/python/test_prepared.py.
#ifndef RINGATTN_CLIENT_PYTHON_PYTHON_PREPARED_H_
#define RINGATTN_CLIENT_PYTHON_PYTHON_PREPARED_H_

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/api/prepared_call.h"
#include "client/python/python_call.h"

namespace ringattn::python {

// Needs the GIL and releases it while waiting.
class PythonPrepared {
 public:
  // `request`: as of PythonCall::Start. `inputs`: the names of the call's inputs, which have no
  // values here. Returns (PythonPrepared or None, error or None). Throws pybind11::value_error
  // naming a field.
  static pybind11::tuple Prepare(std::shared_ptr<ClientHandle> client, bool is_forward,
                                 const pybind11::dict& request,
                                 const std::vector<std::string>& inputs, double ttl_seconds,
                                 double deadline_seconds);
  // {"accepted", "summary"}, as dicts.
  const pybind11::dict& report() const { return report_; }
  bool closed() const { return !call_.has_value(); }
  // The error of the last renewal as a dict, or None.
  pybind11::object Trouble() const;
  // Renews no more. Idempotent.
  void Close() { call_.reset(); }

 private:
  explicit PythonPrepared(client::PreparedCall call);

  std::optional<client::PreparedCall> call_;
  pybind11::dict report_;
};

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PYTHON_PREPARED_H_
