#include "worker/region/region_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/base/monotonic_time.h"
#include "common/observability/log.h"
#include "common/security/secret.h"
#include "worker/region/descriptor_rules.h"

namespace ringattn::worker {
namespace {

constexpr int kBacklog = 64;
// Longest sleep of the thread; deadlines are in seconds.
constexpr int kPollMs = 250;
// Far more than one for each region: a coordinator that announces more is faulty.
constexpr size_t kMaxExpected = 4096;

// Removes only a socket file on which no process listens.
void RemoveLeftover(const std::string& path) {
  struct stat file = {};
  if (lstat(path.c_str(), &file) != 0 || !S_ISSOCK(file.st_mode)) return;
  if (ConnectLocally(path).ok()) return;  // bind will report that it is in use
  unlink(path.c_str());
}

AttachCode CodeOf(const absl::Status& import) {
  switch (import.code()) {
    case absl::StatusCode::kInvalidArgument:
      return AttachCode::kDescriptorRefused;
    case absl::StatusCode::kFailedPrecondition:
      return AttachCode::kDeviceOutOfReach;
    case absl::StatusCode::kOutOfRange:
      return AttachCode::kTooMuch;
    case absl::StatusCode::kUnimplemented:
      return AttachCode::kKindRefused;
    default:
      return AttachCode::kCannotMap;
  }
}

bool IsServed(int socket, const std::vector<uid_t>& uids) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         std::find(uids.begin(), uids.end(), peer.uid) != uids.end();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RegionListener>> RegionListener::Start(RegionListenerOptions options,
                                                                      RegionListenerHooks hooks) {
  RemoveLeftover(options.socket_path);
  const bool only_own = options.uids == std::vector<uid_t>{geteuid()};
  absl::StatusOr<ScopedDescriptor> listener =
      ListenLocally(options.socket_path, only_own ? 0600 : 0666, kBacklog);
  if (!listener.ok()) return listener.status();
  ScopedDescriptor wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return absl::ErrnoToStatus(errno, "eventfd");
  return std::unique_ptr<RegionListener>(new RegionListener(std::move(options), std::move(hooks),
                                                            *std::move(listener), std::move(wake)));
}

RegionListener::RegionListener(RegionListenerOptions options, RegionListenerHooks hooks,
                               ScopedDescriptor listener, ScopedDescriptor wake)
    : options_(std::move(options)),
      hooks_(std::move(hooks)),
      listener_(std::move(listener)),
      wake_(std::move(wake)),
      importer_(options_.device != nullptr && options_.device->imports_memory()
                    ? std::make_unique<RegionImporter>(
                          options_.device, options_.max_imported_bytes, [this] { Wake(); },
                          hooks_.on_imported_bytes)
                    : nullptr),
      thread_([this] { Run(); }) {}

RegionListener::~RegionListener() { Stop(); }

void RegionListener::Stop() {
  std::map<std::string, std::shared_ptr<Region>> regions;
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
  }
  Wake();
  thread_.join();
  importer_.reset();
  unlink(options_.socket_path.c_str());
  for (const Connection& connection : connections_) {
    if (connection.region != nullptr) connection.region->Release();
  }
  connections_.clear();
  absl::MutexLock lock(&mutex_);
  regions.swap(regions_);  // unmapped after the lock is released
  expected_.clear();
  forgotten_.clear();
}

// ------------------------------------------------------- called by other threads

void RegionListener::Expect(const std::string& region_id, const std::string& token, int64_t bytes,
                            absl::Time deadline, bool is_cuda) {
  const absl::Time now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  // Only the newest token of a region is valid: clients may request one repeatedly.
  std::erase_if(expected_, [&](const Expected& entry) {
    return entry.deadline < now || entry.region_id == region_id;
  });
  // Spent tokens are kept only to reject them at once.
  if (expected_.size() >= kMaxExpected) {
    std::erase_if(expected_, [](const Expected& entry) { return entry.is_spent; });
  }
  if (expected_.size() < kMaxExpected)
    expected_.push_back({region_id, token, bytes, deadline, is_cuda});
  Wake();  // a connection may already have presented this token
}

void RegionListener::Forget(const std::string& region_id) {
  {
    absl::MutexLock lock(&mutex_);
    std::erase_if(expected_, [&](const Expected& entry) { return entry.region_id == region_id; });
    const auto found = regions_.find(region_id);
    if (found == regions_.end()) return;
    found->second->Release();
    forgotten_.push_back(found->second);
  }
  Wake();
}

void RegionListener::ForgetAll() {
  {
    absl::MutexLock lock(&mutex_);
    expected_.clear();
    for (const auto& [id, region] : regions_) {
      region->Release();
      forgotten_.push_back(region);
    }
  }
  Wake();
}

std::shared_ptr<Region> RegionListener::Find(const std::string& region_id) const {
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(region_id);
  if (found == regions_.end() || found->second->released()) return nullptr;
  return found->second;
}

size_t RegionListener::regions() const {
  absl::MutexLock lock(&mutex_);
  return regions_.size();
}

void RegionListener::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

// --------------------------------------------------------- the listener's thread

void RegionListener::Run() {
  std::vector<pollfd> polled;
  while (true) {
    polled.assign(2, {});
    polled[0] = {wake_.get(), POLLIN, 0};
    // At the limit no connection is accepted. Connections wait in the kernel's backlog, which costs
    // nothing.
    const bool full = connections_.size() >= options_.max_regions + options_.max_unattached;
    polled[1] = {full ? -1 : listener_.get(), POLLIN, 0};
    for (const Connection& connection : connections_) {
      polled.push_back({connection.socket.get(), POLLIN, 0});
    }
    poll(polled.data(), polled.size(), kPollMs);
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    uint64_t woken = 0;
    (void)!read(wake_.get(), &woken, sizeof(woken));
    const absl::Time now = MonotonicNow();
    for (size_t i = connections_.size(); i-- > 0;) {
      Connection& connection = connections_[i];
      // An import may take longer than the deadline.
      const bool late =
          connection.region == nullptr && connection.import == nullptr && connection.deadline < now;
      if (late || (polled[i + 2].revents != 0 && !Serve(connection)) ||
          (!connection.presented.token.empty() && !Attach(connection)) ||
          (connection.import != nullptr && !FinishImport(connection))) {
        Close(i);
      }
    }
    CloseForgotten();
    if (polled[1].revents != 0) Accept();
  }
}

void RegionListener::Accept() {
  ScopedDescriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    // Out of descriptors: the pending connection would wake this thread again at once.
    if (errno == EMFILE || errno == ENFILE) absl::SleepFor(absl::Milliseconds(50));
    return;
  }
  Connection connection;
  connection.socket = std::move(socket);
  connection.deadline = MonotonicNow() + options_.attach_timeout;
  if (!IsServed(connection.socket.get(), options_.uids)) {
    Refuse(connection, AttachCode::kForeignUser, "this user may not share memory (--local_uids)");
    return;
  }
  connections_.push_back(std::move(connection));
  EvictOldest();
}

void RegionListener::EvictOldest() {
  // A connection that is importing counts as a region; max_regions bounds those.
  const auto waits = [](const Connection& c) { return c.region == nullptr && c.import == nullptr; };
  const auto waiting = std::count_if(connections_.begin(), connections_.end(), waits);
  if (waiting <= static_cast<int64_t>(options_.max_unattached)) return;
  Close(std::find_if(connections_.begin(), connections_.end(), waits) - connections_.begin());
}

bool RegionListener::Serve(Connection& connection) {
  absl::StatusOr<LocalMessage> received =
      ReceiveMessage(connection.socket.get(), kMaxAttachDatagramBytes, MSG_DONTWAIT);
  if (absl::IsUnavailable(received.status())) return true;
  if (!received.ok() || received->bytes.empty()) return false;
  const std::optional<ClientMessage> message =
      received->is_cut ? std::nullopt : ReadClientMessage(received->bytes);
  if (!message.has_value()) {
    return Refuse(connection, AttachCode::kNotUnderstood, "the message is not valid in version 2");
  }
  if (const auto* other = std::get_if<OtherVersion>(&*message)) {
    return RefuseVersion(connection, other->version);
  }
  if (const auto* unknown = std::get_if<UnknownMemory>(&*message)) {
    return Refuse(connection, AttachCode::kKindRefused,
                  absl::StrCat("the memory's kind is ", unknown->kind,
                               ", must be 1 (host memory), 2 or 3 (CUDA memory)"));
  }
  if (const auto* attach = std::get_if<AttachMessage>(&*message)) {
    return TakeToken(connection, *attach, *received);
  }
  if (connection.region == nullptr || !received->descriptors.empty()) {
    return Refuse(connection, AttachCode::kNotUnderstood,
                  "a fence needs an attached region and no descriptor");
  }
  const uint64_t number = std::get<FenceMessage>(*message).number;
  connection.region->Fence(number);
  return Answer(connection, {AttachCode::kFenced, "", number});
}

std::optional<RegionListener::Expected> RegionListener::TakeExpected(const std::string& token,
                                                                     bool* known) {
  const absl::Time now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  // Compares all tokens, so that the time does not depend on the match.
  Expected* found = nullptr;
  for (Expected& entry : expected_) {
    if (SecretsEqual(entry.token, token)) found = &entry;
  }
  *known = found != nullptr;
  if (found == nullptr || std::exchange(found->is_spent, true) || found->deadline < now) {
    return std::nullopt;
  }
  return *found;
}

bool RegionListener::TakeToken(Connection& connection, const AttachMessage& message,
                               LocalMessage& received) {
  const size_t descriptors = message.memory == MemoryKind::kCudaIpc ? 0 : 1;
  if (connection.region != nullptr || connection.import != nullptr ||
      !connection.presented.token.empty() || received.descriptors.size() != descriptors) {
    return Refuse(
        connection, AttachCode::kNotUnderstood,
        absl::StrCat("a connection attaches one region, with ", descriptors, " descriptors"));
  }
  connection.presented = message;
  if (descriptors > 0) connection.memory = std::move(received.descriptors.front());
  connection.token_deadline = MonotonicNow() + options_.token_wait;
  return Attach(connection);
}

bool RegionListener::Attach(Connection& connection) {
  bool known = false;
  const std::optional<Expected> expected = TakeExpected(connection.presented.token, &known);
  // The client may be faster than the coordinator's message.
  if (!known && MonotonicNow() < connection.token_deadline) return true;
  if (!expected.has_value()) {
    return Refuse(connection, AttachCode::kNoSuchToken, "the token is unknown, used or expired");
  }
  connection.presented.token.clear();
  const bool is_cuda = connection.presented.memory != MemoryKind::kHostMemfd;
  if (is_cuda && importer_ == nullptr) {
    return Refuse(connection, AttachCode::kKindRefused,
                  "this worker does not accept CUDA memory (--local_memory, or it has no GPU)");
  }
  if (is_cuda != expected->is_cuda) {
    return Refuse(
        connection, AttachCode::kKindRefused,
        absl::StrCat("a region of ", expected->is_cuda ? "CUDA" : "host", " memory was expected"));
  }
  return is_cuda ? BeginImport(connection, *expected) : AttachHost(connection, *expected);
}

bool RegionListener::MayKeep(const Connection& connection, const std::string& region_id) {
  const auto imports_it = [&](const Connection& c) {
    return &c != &connection && c.import != nullptr && c.region_id == region_id;
  };
  if (Find(region_id) == nullptr && regions() < options_.max_regions &&
      std::none_of(connections_.begin(), connections_.end(), imports_it)) {
    return true;
  }
  return Refuse(connection, AttachCode::kCannotMap,
                "the region is attached already, or too many regions are attached");
}

bool RegionListener::AttachHost(Connection& connection, const Expected& expected) {
  const ScopedDescriptor memory = std::move(connection.memory);
  const int fd = memory.get();
  if (absl::Status status = CheckRegionDescriptor(fd, expected.bytes); !status.ok()) {
    return Refuse(connection, AttachCode::kDescriptorRefused, status.message());
  }
  if (!MayKeep(connection, expected.region_id)) return false;
  absl::StatusOr<std::shared_ptr<Region>> region =
      Region::Map(expected.region_id, fd, expected.bytes);
  if (!region.ok()) {
    return Refuse(connection, AttachCode::kCannotMap, region.status().message());
  }
  return Keep(connection, *std::move(region));
}

bool RegionListener::BeginImport(Connection& connection, const Expected& expected) {
  if (!MayKeep(connection, expected.region_id)) return false;
  connection.region_id = expected.region_id;
  connection.import =
      importer_->Start(expected.region_id, expected.bytes, std::move(connection.presented.cuda),
                       std::move(connection.memory));
  return true;
}

bool RegionListener::FinishImport(Connection& connection) {
  if (!connection.import->is_done()) return true;
  absl::StatusOr<std::shared_ptr<Region>> region = connection.import->Take();
  if (!region.ok()) {
    return Refuse(connection, CodeOf(region.status()), region.status().message());
  }
  if (!MayKeep(connection, connection.region_id)) return false;
  connection.import.reset();
  return Keep(connection, *std::move(region));
}

bool RegionListener::Keep(Connection& connection, std::shared_ptr<Region> region) {
  connection.region = region;
  {
    absl::MutexLock lock(&mutex_);
    regions_[region->id()] = region;
  }
  LogInfo("region attached", {{"memory", region->on_device() ? "cuda" : "host"},
                              {"bytes", region->bytes()},
                              {"regions", regions()}});
  hooks_.on_attached(region, regions());
  return Answer(connection, {AttachCode::kAttached, "", 0});
}

// Answers in version 1 if the client uses that; its answers include this one.
bool RegionListener::RefuseVersion(const Connection& connection, uint32_t version) {
  const WorkerAnswer answer{
      AttachCode::kNotUnderstood,
      absl::StrCat("version ", version,
                   " of the attach protocol is not supported; this worker uses version ",
                   kAttachVersion)};
  LogWarning("a client's memory was rejected", {{"why", answer.detail}});
  hooks_.on_refused(answer.code);
  (void)SendMessage(connection.socket.get(), Encode(answer, version == 1 ? 1 : kAttachVersion),
                    /*descriptor=*/-1, MSG_DONTWAIT);
  return false;
}

bool RegionListener::Refuse(const Connection& connection, AttachCode code,
                            absl::string_view detail) {
  LogWarning("a client's memory was rejected", {{"why", detail}});
  hooks_.on_refused(code);
  Answer(connection, {code, std::string(detail), 0});
  return false;
}

// A client that does not read its answers is disconnected.
bool RegionListener::Answer(const Connection& connection, const WorkerAnswer& answer) {
  return SendMessage(connection.socket.get(), Encode(answer), /*descriptor=*/-1, MSG_DONTWAIT).ok();
}

void RegionListener::CloseForgotten() {
  std::vector<std::shared_ptr<Region>> forgotten;
  {
    absl::MutexLock lock(&mutex_);
    forgotten.swap(forgotten_);
  }
  for (const std::shared_ptr<Region>& region : forgotten) {
    const auto found = std::find_if(connections_.begin(), connections_.end(),
                                    [&](const Connection& c) { return c.region == region; });
    if (found != connections_.end()) Close(found - connections_.begin());
  }
}

void RegionListener::Close(size_t index) {
  const std::shared_ptr<Region> region = connections_[index].region;
  if (region != nullptr) {
    region->Release();
    {
      absl::MutexLock lock(&mutex_);
      const auto found = regions_.find(region->id());
      if (found != regions_.end() && found->second == region) regions_.erase(found);
    }
    LogInfo("region released", {{"memory", region->on_device() ? "cuda" : "host"},
                                {"bytes", region->bytes()},
                                {"regions", regions()}});
    hooks_.on_gone(region, regions());
  }
  connections_.erase(connections_.begin() + static_cast<ptrdiff_t>(index));
}

}  // namespace ringattn::worker
