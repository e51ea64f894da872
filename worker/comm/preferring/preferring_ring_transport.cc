#include "worker/comm/preferring/preferring_ring_transport.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace ringattn::worker {
namespace {

// "<bytes of first>,<bytes of second>:" and the two blobs.
std::string Join(const std::string& first, const std::string& second) {
  return absl::StrCat(first.size(), ",", second.size(), ":", first, second);
}

bool Split(absl::string_view text, std::string* first, std::string* second) {
  const size_t comma = text.find(','), colon = text.find(':');
  if (colon == absl::string_view::npos || comma > colon) return false;
  uint32_t first_size = 0, second_size = 0;
  if (!absl::SimpleAtoi(text.substr(0, comma), &first_size) ||
      !absl::SimpleAtoi(text.substr(comma + 1, colon - comma - 1), &second_size)) {
    return false;
  }
  text.remove_prefix(colon + 1);
  if (text.size() != uint64_t{first_size} + second_size) return false;
  *first = std::string(text.substr(0, first_size));
  *second = std::string(text.substr(first_size));
  return true;
}

}  // namespace

PreferringRingTransport::PreferringRingTransport(std::unique_ptr<RingTransport> first,
                                                 std::unique_ptr<RingTransport> second, Hooks hooks)
    : first_(std::move(first)), second_(std::move(second)), hooks_(std::move(hooks)) {}

absl::StatusOr<std::string> PreferringRingTransport::Prepare(uint64_t generation, int rank,
                                                             int world_size) {
  bool given_up = first_ == nullptr;
  if (!given_up) {
    absl::MutexLock lock(&mutex_);
    given_up = failures_ >= kGiveUpAfter;
  }
  absl::StatusOr<std::string> first = given_up ? absl::FailedPreconditionError("not to be had")
                                               : first_->Prepare(generation, rank, world_size);
  absl::StatusOr<std::string> second = second_->Prepare(generation, rank, world_size);
  if (!first.ok() && !second.ok()) return second.status();
  return Join(first.ok() ? *first : "", second.ok() ? *second : "");
}

absl::StatusOr<std::unique_ptr<Communicator>> PreferringRingTransport::Connect(
    uint64_t generation, const std::vector<std::string>& blobs, absl::Time deadline) {
  std::vector<std::string> first(blobs.size()), second(blobs.size());
  for (size_t rank = 0; rank < blobs.size(); ++rank) {
    if (!Split(blobs[rank], &first[rank], &second[rank])) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, "'s blob is malformed"));
    }
  }
  const absl::Status suits = hooks_.first_suits(first);
  if (hooks_.on_choice) hooks_.on_choice(suits.ok(), suits);
  if (!suits.ok()) {
    if (first_ != nullptr) first_->Cancel();
    for (size_t rank = 0; rank < second.size(); ++rank) {
      if (!second[rank].empty()) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(suits.message(), ", and rank ", rank, " has no other transport"));
    }
    return second_->Connect(generation, second, deadline);
  }
  if (first_ == nullptr) return absl::InvalidArgumentError("a blob that this rank did not give");
  second_->Cancel();
  absl::StatusOr<std::unique_ptr<Communicator>> communicator =
      first_->Connect(generation, first, deadline);
  absl::MutexLock lock(&mutex_);
  if (communicator.ok()) failures_ = 0;
  if (absl::IsFailedPrecondition(communicator.status())) ++failures_;
  return communicator;
}

void PreferringRingTransport::Cancel() {
  if (first_ != nullptr) first_->Cancel();
  second_->Cancel();
}

}  // namespace ringattn::worker
