// NcclLibrary: the functions of libnccl.so.2 that this worker uses, loaded at run
// time, so that one binary starts with and without NCCL.
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_LIBRARY_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_LIBRARY_H_

#include <nccl.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// Thread safe; lives as long as the process, since NCCL's threads may outlive their
// communicators.
class NcclLibrary {
 public:
  // Loads `path`; if empty what $RINGATTN_NCCL names; if that is empty too
  // libnccl.so.2 wherever the loader finds it: the bundle's lib folder,
  // LD_LIBRARY_PATH, the system's. NOT_FOUND with the loader's words if there is none,
  // FAILED_PRECONDITION if it is older than 2.18 or lacks a function.
  //
  // Sets NCCL_NVLS_ENABLE=0 in the environment: nothing here uses multicast, which NCCL
  // would otherwise reserve memory for (and which shared hosts may not stand). To be
  // called before other threads read the environment.
  static absl::StatusOr<const NcclLibrary*> Load(const std::string& path);

  const std::string& version() const { return version_; }  // "2.28.9"

  // UNAVAILABLE with NCCL's own words behind `call`; OK for ncclSuccess and
  // ncclInProgress. `communicator` may be null.
  absl::Status ToStatus(ncclResult_t result, const char* call, ncclComm_t communicator) const;

  decltype(&::ncclGetVersion) GetVersion = nullptr;
  decltype(&::ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&::ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&::ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&::ncclCommAbort) CommAbort = nullptr;
  decltype(&::ncclGroupStart) GroupStart = nullptr;
  decltype(&::ncclGroupEnd) GroupEnd = nullptr;
  decltype(&::ncclSend) Send = nullptr;
  decltype(&::ncclRecv) Recv = nullptr;
  decltype(&::ncclGetErrorString) GetErrorString = nullptr;
  decltype(&::ncclGetLastError) GetLastError = nullptr;

 private:
  NcclLibrary() = default;
  absl::Status Resolve(void* library, const std::string& name);

  std::string version_;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_NCCL_NCCL_LIBRARY_H_
