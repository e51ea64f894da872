#include "worker/comm/wire/wire_handshake.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/security/secret.h"
#include "common/security/token.h"
#include "worker/comm/wire/wire_integers.h"

namespace ringattn::worker {
namespace {

constexpr absl::string_view kMagic = "RAWIRE01";
constexpr size_t kNonceBytes = kTokenBytes;
constexpr size_t kProofBytes = kTokenBytes;
constexpr size_t kHelloBytes = 8 + 8 + 3 * 4 + kNonceBytes;
constexpr size_t kAnswerBytes = 8 + kNonceBytes + kProofBytes;

absl::Status CheckMagic(absl::string_view message) {
  if (message.substr(0, kMagic.size()) == kMagic) return absl::OkStatus();
  return absl::InvalidArgumentError("the peer does not speak this protocol");
}

absl::Status CheckProof(absl::string_view given, absl::string_view expected) {
  if (SecretsEqual(given, expected)) return absl::OkStatus();
  return absl::PermissionDeniedError("the peer does not know the ring's token");
}

}  // namespace

static_assert(kHelloBytes <= WireHandshake::kLongestMessage &&
              kAnswerBytes <= WireHandshake::kLongestMessage);

WireHandshake WireHandshake::Connector(WireHandshakeOptions options, int peer, int stripe) {
  WireHandshake handshake(std::move(options));
  handshake.peer_ = peer;
  handshake.stripe_ = stripe;
  std::string& hello = handshake.hello_;
  hello = std::string(kMagic);
  AppendInteger(handshake.options_.generation, 8, &hello);
  AppendInteger(static_cast<uint64_t>(handshake.options_.rank), 4, &hello);
  AppendInteger(static_cast<uint64_t>(peer), 4, &hello);
  AppendInteger(static_cast<uint64_t>(stripe), 4, &hello);
  hello += RandomToken();
  handshake.output_ = hello;
  handshake.step_ = Step::kAwaitAnswer;
  handshake.wanted_ = kAnswerBytes;
  return handshake;
}

WireHandshake WireHandshake::Acceptor(WireHandshakeOptions options, int world_size, int stripes) {
  WireHandshake handshake(std::move(options));
  handshake.world_size_ = world_size;
  handshake.stripes_ = stripes;
  handshake.step_ = Step::kAwaitHello;
  handshake.wanted_ = kHelloBytes;
  return handshake;
}

std::string WireHandshake::TakeOutput() { return std::exchange(output_, {}); }

std::string WireHandshake::Proof(absl::string_view who) const {
  return DeriveToken(options_.token, absl::StrCat(who, hello_, nonce_, options_.binding));
}

absl::Status WireHandshake::Take(absl::string_view message) {
  switch (step_) {
    case Step::kAwaitHello:
      return TakeHello(message);
    case Step::kAwaitAnswer:
      return TakeAnswer(message);
    case Step::kAwaitProof:
      if (absl::Status status = CheckProof(message, Proof("connector")); !status.ok()) {
        return status;
      }
      output_ = std::string(kMagic);
      break;
    case Step::kAwaitAccept:
      if (absl::Status status = CheckMagic(message); !status.ok()) return status;
      break;
    case Step::kDone:
      return absl::InvalidArgumentError("the handshake is complete");
  }
  step_ = Step::kDone;
  wanted_ = 0;
  return absl::OkStatus();
}

absl::Status WireHandshake::TakeHello(absl::string_view hello) {
  if (absl::Status status = CheckMagic(hello); !status.ok()) return status;
  const char* const fields = hello.data() + kMagic.size();
  const uint64_t generation = ReadInteger(fields, 8);
  const uint64_t from = ReadInteger(fields + 8, 4), to = ReadInteger(fields + 12, 4);
  const uint64_t stripe = ReadInteger(fields + 16, 4);
  const auto own = static_cast<uint64_t>(options_.rank);
  if (generation != options_.generation) {
    return absl::InvalidArgumentError(
        absl::StrCat("the peer is of generation ", generation, ", not ", options_.generation));
  }
  if (to != own || from <= own || from >= static_cast<uint64_t>(world_size_) ||
      stripe >= static_cast<uint64_t>(stripes_)) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", own, " of ", world_size_,
                                                   " expects no connection ", stripe, " of rank ",
                                                   from, " to rank ", to));
  }
  peer_ = static_cast<int>(from);
  stripe_ = static_cast<int>(stripe);
  hello_ = std::string(hello);
  nonce_ = RandomToken();
  output_ = absl::StrCat(kMagic, nonce_, Proof("acceptor"));
  step_ = Step::kAwaitProof;
  wanted_ = kProofBytes;
  return absl::OkStatus();
}

absl::Status WireHandshake::TakeAnswer(absl::string_view answer) {
  if (absl::Status status = CheckMagic(answer); !status.ok()) return status;
  nonce_ = std::string(answer.substr(kMagic.size(), kNonceBytes));
  absl::Status status = CheckProof(answer.substr(kMagic.size() + kNonceBytes), Proof("acceptor"));
  if (!status.ok()) return status;
  output_ = Proof("connector");
  step_ = Step::kAwaitAccept;
  wanted_ = kMagic.size();
  return absl::OkStatus();
}

}  // namespace ringattn::worker
