#include "worker/comm/fallback/fallback_ring_transport.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn::worker {
namespace {

// Format: "<bytes of primary>,<bytes of fallback>:" followed by both blobs.
std::string Join(const std::string& primary, const std::string& fallback) {
  return absl::StrCat(primary.size(), ",", fallback.size(), ":", primary, fallback);
}

bool Split(absl::string_view text, std::string* primary, std::string* fallback) {
  const size_t comma = text.find(','), colon = text.find(':');
  if (colon == absl::string_view::npos || comma > colon) return false;
  uint32_t primary_size = 0, fallback_size = 0;
  if (!absl::SimpleAtoi(text.substr(0, comma), &primary_size) ||
      !absl::SimpleAtoi(text.substr(comma + 1, colon - comma - 1), &fallback_size)) {
    return false;
  }
  text.remove_prefix(colon + 1);
  if (text.size() != uint64_t{primary_size} + fallback_size) return false;
  *primary = std::string(text.substr(0, primary_size));
  *fallback = std::string(text.substr(primary_size));
  return true;
}

}  // namespace

FallbackRingTransport::FallbackRingTransport(std::unique_ptr<RingTransport> primary,
                                             std::unique_ptr<RingTransport> fallback, Hooks hooks)
    : primary_(std::move(primary)), fallback_(std::move(fallback)), hooks_(std::move(hooks)) {}

absl::StatusOr<std::string> FallbackRingTransport::Prepare(uint64_t generation, int rank,
                                                           int world_size) {
  bool given_up = primary_ == nullptr;
  if (!given_up) {
    absl::MutexLock lock(&mutex_);
    given_up = failures_ >= kGiveUpAfter;
  }
  absl::StatusOr<std::string> primary =
      given_up ? absl::FailedPreconditionError(
                     "the primary transport has been disabled after repeated failures")
               : primary_->Prepare(generation, rank, world_size);
  absl::StatusOr<std::string> fallback = fallback_->Prepare(generation, rank, world_size);
  if (!primary.ok() && !fallback.ok()) return fallback.status();
  return Join(primary.ok() ? *primary : "", fallback.ok() ? *fallback : "");
}

absl::StatusOr<std::unique_ptr<Communicator>> FallbackRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  std::vector<std::string> primary(blobs.size()), fallback(blobs.size());
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (!Split(blobs[rank], &primary[rank], &fallback[rank])) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, "'s blob is malformed"));
    }
  }
  const absl::Status suits = hooks_.primary_suits(primary);
  if (hooks_.on_choice) hooks_.on_choice(suits.ok(), suits);
  if (!suits.ok()) {
    if (primary_ != nullptr) primary_->Cancel();
    for (size_t rank = 0; rank < fallback.size(); ++rank) {
      if (!fallback[rank].empty()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(suits.message(), ", and rank ", rank, " has no other transport"));
    }
    return fallback_->Connect(generation, fallback, deadline);
  }
  if (primary_ == nullptr)
    return absl::InvalidArgumentError("the blob is not the one that this rank returned");
  fallback_->Cancel();
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      primary_->Connect(generation, primary, deadline);
  absl::MutexLock lock(&mutex_);
  if (communicator.ok()) failures_ = 0;
  if (absl::IsFailedPrecondition(communicator.status())) ++failures_;
  return communicator;
}

void FallbackRingTransport::Cancel() {
  if (primary_ != nullptr) primary_->Cancel();
  fallback_->Cancel();
}

}  // namespace ringattn::worker
