// NcclLibrary: the functions of libnccl.so.2 that this worker uses, loaded at run time, so that one
// binary works with and without NCCL.
#ifndef RINGATTN_WORKER_COMM_NCCL_NCCL_LIBRARY_H_
#define RINGATTN_WORKER_COMM_NCCL_NCCL_LIBRARY_H_

#include <nccl.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ringattn::worker {

// Thread safe. Lives as long as the process, because NCCL's threads may outlive their
// communicators.
class NcclLibrary {
 public:
  // Loads `path`; if that is empty, the library that $RINGATTN_NCCL names; if that is empty too,
  // libnccl.so.2 from the loader's search path (the bundle's lib folder, LD_LIBRARY_PATH, the
  // system). Returns NOT_FOUND with the loader's message, or FAILED_PRECONDITION if the library is
  // older than 2.18 or lacks a function.
  //
  // Sets NCCL_NVLS_ENABLE=0 in the environment: nothing here uses multicast, for which NCCL would
  // otherwise reserve memory. Must be called before other threads read the environment.
  static absl::StatusOr<const NcclLibrary*> Load(const std::string& path);

  const std::string& version() const { return version_; }  // for example "2.28.9"

  // Returns OK for ncclSuccess and ncclInProgress, else UNAVAILABLE with `call` and NCCL's message.
  // `communicator` may be null.
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
