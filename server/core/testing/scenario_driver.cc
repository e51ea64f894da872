#include "server/core/testing/scenario_driver.h"

#include <cstdlib>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/core/requests/plan_summary.h"
#include "server/core/testing/scenario_commands.h"
#include "server/core/testing/scenario_kv.h"
#include "server/core/testing/scenario_requests.h"

namespace ringattn::server {

class ScenarioDriver::Impl {
 public:
  explicit Impl(const CoordinatorConfig& config) : config_(config), core_(config) {}

  // Executes one command and returns its trace.
  ScenarioLines Run(const std::string& command) {
    Execute(absl::StrSplit(command, ' ', absl::SkipEmpty()));
    return std::exchange(lines_, {});
  }

 private:
  struct Worker {
    ConnectionId connection = 0;
    bool manual = false;
    bool silent = false;
    v1::Heartbeat heartbeat;
  };

  void Execute(const Args& args) {
    const std::string& verb = args[0];
    if (workers_.count(verb) > 0) return SendFromWorker(verb, args);
    if (verb == "join") return Join(args);
    if (verb == "disconnect") return Feed(WorkerDisconnected{Remove(args[1])});
    if (verb == "ring") return FormRing(args);
    if (verb == "manual" || verb == "silent") {
      for (size_t i = 1; i < args.size(); ++i) {
        (verb == "manual" ? workers_[args[i]].manual : workers_[args[i]].silent) = true;
      }
      return;
    }
    if (verb == "cut" || verb == "heal") {
      for (const auto& [a, b] : {std::pair(args[1], args[2]), std::pair(args[2], args[1])}) {
        if (verb == "cut") {
          cuts_.emplace(a, b);
        } else {
          cuts_.erase({a, b});
        }
      }
      return;
    }
    if (verb == "request") return Request(args);
    if (verb == "accepted") return Serve(args, /*run=*/false);
    if (verb == "running") return Serve(args, /*run=*/true);
    if (verb == "upload") return Feed(UploadProgressed{Stream(args[1])});
    if (verb == "download") return Feed(DownloadProgressed{Stream(args[1])});
    if (verb == "stalled") {
      MembersStalled event{Stream(args[1]), {}};
      for (size_t i = 2; i < args.size(); ++i) {
        event.members.push_back(std::atoi(args[i].c_str()));
      }
      return Feed(event);
    }
    if (verb == "downloaded") return Feed(DownloadFinished{Stream(args[1])});
    if (verb == "share" || verb == "unshare") return Share(args);
    if (verb == "end") {
      Failure why;
      why.code = absl::StatusCode::kCancelled;
      why.reason = "CLIENT_CANCELLED";
      return Feed(RequestEnded{Stream(args[1]), why});
    }
    if (verb == "shard") {
      return Feed(ShardStreamFailed{Stream(args[1]), std::atoi(args[2].c_str()), Rest(args, 3)});
    }
    if (verb == "cancel") return Feed(CancelRequested{args[1], Option(args, "principal", "")});
    if (verb == "hold" && args.back() == "plans") {
      holds_plans_ = true;
      return;
    }
    if (verb == "planned") return Feed(MakePlan(held_plans_.at(Stream(args[1]))));
    if (verb == "plan_failed") {
      Planned planned = MakePlan(held_plans_.at(Stream(args[1])));
      planned.plan = args[2] == "late" ? absl::DeadlineExceededError("planning takes longer")
                                       : absl::ResourceExhaustedError("too many wait");
      return Feed(planned);
    }
    if (verb == "delete") {
      return Feed(ResidualDeleted{args[1], Option(args, "principal", "")});
    }
    if (verb == "renew") {
      return Feed(ResidualsRenewed{{args[1]}, Option(args, "principal", ""), Duration(args[2])});
    }
    if (verb == "drain" || verb == "undrain") return Feed(DrainRequested{verb == "undrain"});
    if (verb == "reform") return Feed(ReformRequested{});
    if (verb == "wait") return Wait(Duration(args[1]));
    if (verb == "pause") {
      now_ += Duration(args[1]);
      return Feed(Tick{});
    }
    if (std::optional<Event> event = kv_clients_.EventOf(args)) return Feed(*event);
    if (verb == "caches") return Show(ScenarioKvClients::Show(core_, args));
    if (IsQuery(verb)) return Show(RunQuery(core_, args, {published_, losses_reported_}));
    lines_.push_back({"", absl::StrCat("unknown command ", verb)});
  }

  void Show(const ScenarioLines& lines) { lines_.insert(lines_.end(), lines.begin(), lines.end()); }

  StreamId Stream(const std::string& name) {
    const auto [found, added] = streams_.emplace(name, streams_.size() + 1);
    return found->second;
  }

  std::string StreamName(StreamId stream) const {
    for (const auto& [name, id] : streams_) {
      if (id == stream) return name;
    }
    return "?";
  }

  std::string WorkerName(ConnectionId connection) const {
    const auto found = names_.find(connection);
    return found == names_.end() ? "?" : found->second;
  }

  void Join(const Args& args) {
    WorkerJoined joined;
    joined.connection = ++last_connection_;
    joined.registration = RegistrationOf(args);
    joined.registration.set_incarnation(absl::StrCat(last_connection_));
    workers_[args[1]] = {};
    workers_[args[1]].connection = joined.connection;
    names_[joined.connection] = args[1];
    Feed(joined);
  }

  void FormRing(const Args& args) {
    for (size_t i = 1; i < args.size(); ++i) Join({"join", args[i]});
    Wait(2 * config_.forming_delay);
    lines_.clear();
  }

  ConnectionId Remove(const std::string& name) {
    const ConnectionId connection = workers_.at(name).connection;
    workers_.erase(name);
    return connection;
  }

  void Send(const std::string& name, v1::JoinRequest message) {
    Feed(WorkerMessage{workers_.at(name).connection, std::move(message)});
  }

  void SendFromWorker(const std::string& name, const Args& args) {
    v1::Heartbeat& heartbeat = workers_.at(name).heartbeat;
    if (args[1] == "at") return SetPosition(args, &heartbeat);
    std::optional<v1::JoinRequest> message = MessageOf(name, args, heartbeat.operation_id());
    if (message.has_value()) return Send(name, *std::move(message));
    lines_.push_back({"", absl::StrCat("unknown message ", args[1])});
  }

  void Request(const Args& args) { Feed(RequestOf(args, Stream(args[1]), now_, core_)); }

  // "share R NAME..." announces the region and attaches it to workers; "unshare" releases it.
  void Share(const Args& args) {
    AttachRequested attach;
    attach.bytes = 1000;
    attach.region_id = RegionId(args[1]);
    attach.is_new = shared_.insert(args[1]).second;
    attach.tokens = Args(8, "token");
    if (args[0] == "share") Feed(attach);
    for (size_t i = 2; i < args.size(); ++i) {
      v1::JoinRequest message;
      message.mutable_region_changed()->set_region_id(attach.region_id);
      message.mutable_region_changed()->set_attached(args[0] == "share");
      Send(args[i], message);
    }
  }

  // Sends the request and its members' answers until it is accepted or runs.
  void Serve(const Args& args, bool run) {
    Request(args);
    const std::pair<std::string, std::string> reserve = Hide("reserve ");
    if (reserve.first.empty()) return;
    const Args members = absl::StrSplit(reserve.first, ' ');
    const std::string operation = std::vector<std::string>(absl::StrSplit(reserve.second, ' '))[1];
    for (const std::string& member : members) {
      SendFromWorker(member, {member, "reserved", operation, "residual=100"});
    }
    if (!run || Hide("accepted ").first.empty()) return;
    for (const std::string& member : members)
      SendFromWorker(member, {member, "uploaded", operation});
  }

  // Removes and returns the first line whose text begins so; empty strings if there is none.
  std::pair<std::string, std::string> Hide(const std::string& begin) {
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      if (!absl::StartsWith(line->second, begin)) continue;
      auto hidden = *line;
      lines_.erase(line);
      return hidden;
    }
    return {};
  }

  void Wait(absl::Duration duration) {
    const absl::Time end = now_ + duration;
    while (now_ < end) {
      now_ += config_.tick_interval;
      if (now_ >= next_heartbeat_) {
        next_heartbeat_ += config_.heartbeat_interval;
        Heartbeats();
      }
      Feed(Tick{});
    }
  }

  void Heartbeats() {
    Args beating;
    for (const auto& [name, worker] : workers_) {
      if (!worker.silent) beating.push_back(name);
    }
    for (const std::string& name : beating) {
      v1::JoinRequest message;
      v1::Heartbeat& heartbeat = workers_[name].heartbeat;
      heartbeat.set_sequence(heartbeat.sequence() + 1);
      *message.mutable_heartbeat() = heartbeat;
      Send(name, message);
    }
  }

  // Handles one event, and then the automatic answers of workers.
  void Feed(const Event& event) {
    std::deque<Event> events = {event};
    while (!events.empty()) {
      const std::vector<Action> actions = core_.Handle(events.front(), now_);
      events.pop_front();
      for (const Action& action : actions) {
        std::visit([&](const auto& value) { Record(value, &events); }, action);
      }
    }
  }

  void Record(const SendToWorker& send, std::deque<Event>* answers) {
    const std::string name = WorkerName(send.connection);
    const auto worker = workers_.find(name);
    const v1::JoinResponse& message = send.message;
    const bool is_replaced =
        worker == workers_.end() || worker->second.connection != send.connection;
    if (is_replaced && !message.has_leave()) return;
    std::optional<ScenarioCommand> command = CommandOf(message);
    if (!command.has_value()) return;
    ApplyCuts(name, message, &*command);
    if (message.has_teardown()) worker->second.heartbeat.clear_operation_id();
    if (message.has_reserve()) RecordToken(name, message.reserve());
    if (command->answer.has_value() && !worker->second.manual) {
      if (!worker->second.silent) {
        answers->push_back(WorkerMessage{send.connection, *command->answer});
      }
      return;
    }
    // Equal consecutive messages to several workers become one line.
    if (!lines_.empty() && lines_.back().second == command->text) {
      absl::StrAppend(&lines_.back().first, " ", name);
    } else {
      lines_.push_back({name, command->text});
    }
  }

  // A worker cannot join a ring with a member beyond a cut, and probes fail there.
  void ApplyCuts(const std::string& name, const v1::JoinResponse& message,
                 ScenarioCommand* command) const {
    const auto unreached = [&](const auto& addresses) {
      std::vector<uint32_t> indices;
      for (int i = 0; i < addresses.size(); ++i) {
        const std::string peer(absl::StripSuffix(addresses[i], ":3"));
        if (cuts_.count({name, peer}) > 0) indices.push_back(static_cast<uint32_t>(i));
      }
      return indices;
    };
    if (message.has_commit()) {
      const std::vector<uint32_t> ranks = unreached(message.commit().probe_addresses());
      if (ranks.empty()) return;
      v1::GenerationFailed* failed = command->answer->mutable_generation_failed();
      failed->set_generation(message.commit().generation());
      failed->set_reason("no answer");
      failed->mutable_unreached()->Assign(ranks.begin(), ranks.end());
    } else if (message.has_probe()) {
      const std::vector<uint32_t> indices = unreached(message.probe().addresses());
      command->answer->mutable_probed()->mutable_unreached()->Assign(indices.begin(),
                                                                     indices.end());
    }
  }

  // Records that tokens never repeat.
  void RecordToken(const std::string& worker, const v1::Reserve& reserve) {
    if (reserve.token().empty()) return;
    tokens_[{worker, reserve.operation_id()}] = reserve.token();
    if (!known_tokens_.insert(reserve.token()).second) lines_.push_back({worker, "repeated token"});
  }

  void Record(const DropWorker& drop, std::deque<Event>*) {
    const std::string name = WorkerName(drop.connection);
    lines_.push_back({name, absl::StrCat("dropped: ", drop.reason)});
    const auto worker = workers_.find(name);
    if (worker != workers_.end() && worker->second.connection == drop.connection) {
      workers_.erase(worker);
    }
  }

  static Planned MakePlan(const PlanThis& ask) {
    Planned planned{ask.stream, ask.generation, nullptr, ask.cost_seconds};
    absl::StatusOr<Plan> plan = PlanRequest(*ask.spec, ask.direction, ask.choice, ask.inputs);
    if (plan.ok()) {
      planned.plan = std::make_shared<const Plan>(WithoutSpans(*std::move(plan)));
    } else {
      planned.plan = plan.status();
    }
    return planned;
  }

  // Plans are made immediately and omitted from the trace, until `hold plans`.
  void Record(const PlanThis& ask, std::deque<Event>* answers) {
    if (!holds_plans_) {
      answers->push_back(MakePlan(ask));
      return;
    }
    held_plans_[ask.stream] = ask;
    lines_.push_back({StreamName(ask.stream), absl::StrCat("plan for ", ask.generation)});
  }

  void Record(const CancelPlan& cancel, std::deque<Event>*) {
    lines_.push_back({StreamName(cancel.stream), "stop planning"});
  }

  void Record(const AcceptRequest& accept, std::deque<Event>*) {
    Args members;
    for (const RingMember& member : accept.members) members.push_back(member.name);
    std::string text =
        absl::StrCat("accepted ", accept.operation_id, " on ", absl::StrJoin(members, " "));
    if (!accept.transport_reason.empty()) {
      absl::StrAppend(&text, " (", accept.transport_reason, ")");
    }
    for (const RingMember& member : accept.members) {
      if (member.token.empty()) continue;
      const bool same = tokens_[{member.name, accept.operation_id}] == member.token;
      absl::StrAppend(&text, " ", member.client_data_address, same ? "" : " WRONG TOKEN");
    }
    lines_.push_back({StreamName(accept.stream), text});
  }

  void Record(const BeginDownload& begin, std::deque<Event>*) {
    std::string text = "download";
    for (const v1::TensorChunk& output : begin.outputs) absl::StrAppend(&text, " ", output.data());
    lines_.push_back({StreamName(begin.stream), text});
  }

  void Record(const FinishRequest& finish, std::deque<Event>*) {
    const std::string& handle = finish.residual_handle;
    const std::string& reason = finish.residual_reason;
    std::string text = absl::StrCat("finished", handle.empty() ? "" : " ", handle,
                                    reason.empty() ? "" : ", not kept: ", reason);
    if (finish.prepared) {
      absl::StrAppend(&text, ", prepared for ", absl::FormatDuration(finish.prepared->ttl), ", ",
                      finish.prepared->bytes, " bytes, found ", finish.prepared->found);
    }
    lines_.push_back({StreamName(finish.stream), text});
  }

  void Record(const FailRequest& fail, std::deque<Event>*) {
    const Failure& failure = fail.failure;
    std::string text =
        absl::StrCat("failed ", absl::StatusCodeToString(failure.code), " ", failure.reason);
    if (failure.retry_after) absl::StrAppend(&text, " retry");
    if (!failure.field.empty()) absl::StrAppend(&text, " field ", failure.field);
    if (!failure.message.empty()) absl::StrAppend(&text, ": ", failure.message);
    lines_.push_back({StreamName(fail.stream), text});
  }

  void Record(const StateChanged&, std::deque<Event>*) {}
  void Record(const TransferAdvanced&, std::deque<Event>*) {}
  void Record(const AttachCompleted& answer, std::deque<Event>*) {
    if (answer.failure)
      lines_.push_back({"", absl::StrCat("not shared: ", answer.failure->reason)});
  }
  void Record(const KvCacheAnswered& answer, std::deque<Event>*) {
    Show(kv_clients_.LinesOf(answer));
  }
  void Record(const KvWriterAnswered& answer, std::deque<Event>*) {
    Show(kv_clients_.LinesOf(answer));
  }
  void Record(const KvWriterEnded& ended, std::deque<Event>*) { Show(kv_clients_.LinesOf(ended)); }
  void Record(const LostWorker&, std::deque<Event>*) { ++losses_reported_; }
  // A single worker's loss appears by its consequences only.
  void Record(const LossEvent& event, std::deque<Event>*) {
    if (event.host.empty()) return;
    Args names;
    for (const LostWorker& loss : event.workers) names.push_back(loss.worker);
    lines_.push_back({"", absl::StrCat("lost host ", event.host, ": ", absl::StrJoin(names, " "))});
  }
  void Record(const LossOutlived& outlived, std::deque<Event>*) {
    lines_.push_back({"", absl::StrCat("ended ", outlived.generation, " after ",
                                       absl::FormatDuration(outlived.duration), ": completed ",
                                       outlived.completed, " ended ", outlived.ended)});
  }
  void Record(const ReachChanged& changed, std::deque<Event>*) {
    lines_.push_back({"", absl::StrCat(changed.reached ? "reached: " : "parted: ", changed.a, " ",
                                       changed.b, ", ", changed.detail)});
  }
  void Record(const TopologyChanged&, std::deque<Event>*) { published_ = core_.topology(); }

  void Record(const ServingChanged& changed, std::deque<Event>*) {
    lines_.push_back({"", changed.serving ? absl::StrCat("serving ", core_.topology().generation())
                                          : "not serving"});
  }

  void Record(const DrainCompleted&, std::deque<Event>*) { lines_.push_back({"", "drained"}); }

  void Record(const RingReformed& reformed, std::deque<Event>*) {
    lines_.push_back({"", absl::StrCat("reformed ", reformed.generation, " ",
                                       absl::StatusCodeToString(reformed.status.code()))});
  }

  const CoordinatorConfig config_;
  Coordinator core_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  absl::Time next_heartbeat_ = now_;
  v1::Topology published_;
  size_t losses_reported_ = 0;
  ScenarioLines lines_;
  std::map<std::string, Worker> workers_;
  std::map<ConnectionId, std::string> names_;
  ConnectionId last_connection_ = 0;
  std::map<std::string, StreamId> streams_;
  bool holds_plans_ = false;
  std::set<std::string> shared_;                        // announced regions
  std::set<std::pair<std::string, std::string>> cuts_;  // names of workers
  std::map<StreamId, PlanThis> held_plans_;
  ScenarioKvClients kv_clients_;
  std::map<std::pair<std::string, std::string>, std::string> tokens_;  // by worker, operation
  std::set<std::string> known_tokens_;
};

ScenarioDriver::ScenarioDriver(const CoordinatorConfig& config)
    : impl_(std::make_unique<Impl>(config)) {}
ScenarioDriver::~ScenarioDriver() = default;

ScenarioLines ScenarioDriver::Run(const std::string& command) { return impl_->Run(command); }

}  // namespace ringattn::server
