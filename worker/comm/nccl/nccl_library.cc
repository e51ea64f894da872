#include "worker/comm/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

namespace ringattn::worker {
namespace {

constexpr char kDefaultName[] = "libnccl.so.2";
// The first release with the non-blocking communicators and CTA limits that are used here.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 0);

std::string VersionText(int code) {
  return absl::StrCat(code / 10000, ".", code / 100 % 100, ".", code % 100);
}

template <typename Function>
bool Find(void* library, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  return *function != nullptr;
}

}  // namespace

absl::StatusOr<const NcclLibrary*> NcclLibrary::Load(const std::string& path) {
  const char* from_environment = std::getenv("RINGATTN_NCCL");
  std::string name = path;
  if (name.empty() && from_environment != nullptr) name = from_environment;
  if (name.empty()) name = kDefaultName;
  setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/1);
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    // Read once, because a second call of dlerror returns null.
    const char* error = dlerror();
    return absl::NotFoundError(
        absl::StrCat("NCCL cannot be loaded: ", error == nullptr ? name.c_str() : error,
                     "; install it, or set --nccl_library or $RINGATTN_NCCL"));
  }
  // Never unloaded, and therefore never freed.
  std::unique_ptr<NcclLibrary> functions(new NcclLibrary());
  if (absl::Status status = functions->Resolve(library, name); !status.ok()) {
    dlclose(library);
    return status;
  }
  return functions.release();
}

absl::Status NcclLibrary::Resolve(void* library, const std::string& name) {
  const char* missing = nullptr;
  const auto find = [&](const char* symbol, auto* function) {
    if (!Find(library, symbol, function) && missing == nullptr) missing = symbol;
  };
  find("ncclGetVersion", &GetVersion);
  find("ncclGetUniqueId", &GetUniqueId);
  find("ncclCommInitRankConfig", &CommInitRankConfig);
  find("ncclCommGetAsyncError", &CommGetAsyncError);
  find("ncclCommAbort", &CommAbort);
  find("ncclGroupStart", &GroupStart);
  find("ncclGroupEnd", &GroupEnd);
  find("ncclSend", &Send);
  find("ncclRecv", &Recv);
  find("ncclGetErrorString", &GetErrorString);
  find("ncclGetLastError", &GetLastError);
  if (missing != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(name, " has no ", missing));
  }
  int version = 0;
  if (absl::Status status = ToStatus(GetVersion(&version), "ncclGetVersion", nullptr);
      !status.ok()) {
    return status;
  }
  version_ = VersionText(version);
  if (version < kOldestVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " is NCCL ", version_, ", older than ", VersionText(kOldestVersion)));
  }
  return absl::OkStatus();
}

absl::Status NcclLibrary::ToStatus(ncclResult_t result, const char* call,
                                   ncclComm_t communicator) const {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* last = GetLastError(communicator);
  return absl::UnavailableError(absl::StrCat(call, ": ", GetErrorString(result),
                                             last == nullptr || *last == '\0' ? "" : ": ",
                                             last == nullptr ? "" : last));
}

}  // namespace ringattn::worker
