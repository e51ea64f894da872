// K/V caches for Python.
// Tests: tests/python/test_kv_cache.py.
#ifndef RINGATTN_CLIENT_PYTHON_PYTHON_KV_H_
#define RINGATTN_CLIENT_PYTHON_PYTHON_KV_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/api/kv_cache.h"
#include "client/python/python_call.h"

namespace ringattn::python {

// The writer of one cache. Keeps its client alive. Methods that wait release the GIL; a pending
// signal (Ctrl-C) ends them with the signal handler's exception. Results are (value, None) or
// (None, error).
class PythonKvCache {
 public:
  // `spec`: KvCacheSpec. `options`: request_id, ttl, world_size, members (Create only), transport,
  // hold, deadline.
  static pybind11::tuple Create(std::shared_ptr<ClientHandle> client, const pybind11::dict& spec,
                                const pybind11::dict& options);
  static pybind11::tuple Open(std::shared_ptr<ClientHandle> client, const pybind11::bytes& cache_id,
                              const pybind11::dict& options);
  static pybind11::tuple List(ClientHandle& client, double deadline_seconds);
  static pybind11::tuple Delete(ClientHandle& client, const pybind11::bytes& cache_id,
                                double deadline_seconds);

  // In a forked child, which has no streams, nothing is closed.
  ~PythonKvCache();

  PythonKvCache(const PythonKvCache&) = delete;
  PythonKvCache& operator=(const PythonKvCache&) = delete;

  pybind11::bytes id() const { return cache_->id(); }
  pybind11::dict spec() const;
  pybind11::dict placement() const;
  uint64_t epoch() const;
  std::string transport() const;
  std::string transport_reason() const;
  int64_t bytes_per_worker() const { return cache_->bytes_per_worker(); }
  pybind11::dict sequences() const;
  uint64_t step() const;
  uint64_t blocks_free() const;
  bool leaving() const;
  pybind11::dict refusal() const;

  // None, or an error.
  pybind11::object Begin(const pybind11::dict& begin);
  // `output`: "out", "out_and_lse", "partial" or "none". Tensors have the buffer protocol; k and v,
  // out and lse may be None.
  pybind11::tuple Call(uint32_t layer, const std::string& output, const pybind11::object& q,
                       const pybind11::object& k, const pybind11::object& v,
                       const pybind11::object& out, const pybind11::object& lse,
                       double deadline_seconds);
  pybind11::object Commit(double deadline_seconds);
  pybind11::object RunCommands(const pybind11::list& commands, double deadline_seconds);
  pybind11::object RoundTrip(double deadline_seconds);
  void Close();
  pybind11::object DeleteCache(double deadline_seconds);

 private:
  PythonKvCache(std::shared_ptr<ClientHandle> client, std::unique_ptr<client::KvCache> cache)
      : client_(std::move(client)), cache_(std::move(cache)) {}
  static pybind11::tuple Wrap(std::shared_ptr<ClientHandle> client,
                              absl::StatusOr<std::unique_ptr<client::KvCache>> cache);

  const std::shared_ptr<ClientHandle> client_;
  std::unique_ptr<client::KvCache> cache_;
};

// Adds the class and the client's functions of caches.
void DefineKvCache(pybind11::module_& module,
                   pybind11::class_<ClientHandle, std::shared_ptr<ClientHandle>>& client);

}  // namespace ringattn::python

#endif  // RINGATTN_CLIENT_PYTHON_PYTHON_KV_H_
