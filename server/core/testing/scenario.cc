#include "server/core/testing/scenario.h"

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
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/core/requests/plan_summary.h"
#include "server/core/testing/scenario_args.h"
#include "server/core/testing/scenario_kv.h"
#include "server/core/testing/scenario_views.h"

namespace ringattn::server {
namespace {

AttentionSpec SpecOf(int64_t tokens) {
  AttentionSpec spec;
  spec.shape.seq_len_q = tokens;
  spec.shape.seq_len_kv = tokens;
  spec.shape.cu_seqlens_q = {0, tokens};
  spec.shape.cu_seqlens_k = {0, tokens};
  return spec;
}

// Sets the limit that "KEY=VALUE" names; returns false for an unknown key.
bool SetConfig(const std::string& key, const std::string& value, CoordinatorConfig* config) {
  const auto number = [&value] { return std::atoi(value.c_str()); };
  if (key == "max_operations_per_worker") {
    config->max_operations_per_worker = number();
  } else if (key == "max_queued_requests") {
    config->limits.max_queued_requests = number();
  } else if (key == "max_queued_requests_per_client") {
    config->limits.max_queued_requests_per_client = number();
  } else if (key == "max_kv_caches") {
    config->limits.max_kv_caches = number();
  } else if (key == "assembly_time_max") {
    config->assembly_time_max = Duration(value);
  } else if (key == "preempt_after") {
    config->preempt_after = Duration(value);
  } else if (key == "run_time_floor") {
    config->run_time_floor = Duration(value);
  } else {
    return false;
  }
  return true;
}

class Scenario {
 public:
  explicit Scenario(const CoordinatorConfig& config) : config_(config), core_(config) {}

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

  void Request(const Args& args) {
    RequestArrived request;
    request.stream = Stream(args[1]);
    request.request_id = Option(args, "id", args[1]);
    request.principal = Option(args, "principal", "");
    request.client = Option(args, "client", request.principal);
    request.terms.weight = std::atof(Option(args, "weight", "1").c_str());
    const auto own = [&](const char* option) -> std::optional<int64_t> {
      const std::string text = Option(args, option, "");
      return text.empty() ? std::nullopt : std::optional<int64_t>(std::atoll(text.c_str()));
    };
    request.terms.max_requests_in_flight = own("in_flight");
    request.terms.max_queued_bytes = own("queued_bytes");
    request.fingerprint = std::atoll(Option(args, "header", "0").c_str());
    request.spec = SpecOf(std::atoll(Option(args, "tokens", "8").c_str()));
    if (Option(args, "option", "") == "segment_ids") request.spec.options.segment_ids = true;
    if (const int64_t length = std::atoll(Option(args, "segment_length", "0").c_str());
        length > 0) {
      request.spec.options.dilation_levels = {{length, 1, std::nullopt, 0, 1}};
    }
    request.choice.tuning.tile_q = std::atoi(Option(args, "tile_q", "0").c_str());
    const std::string members = Option(args, "members", "");
    if (!members.empty()) request.choice.members = absl::StrSplit(members, ',');
    if (Option(args, "dtype", "") == "bf16") request.spec.dtype = DType::kBFloat16;
    const int world = std::atoi(Option(args, "world", "0").c_str());
    if (world > 0) request.choice.world_size = world;
    const std::string region = Option(args, "region", "");
    if (const std::string spans = Option(args, "direct", ""); !spans.empty()) {
      request.transport.accept = {TransportKind::kDirectStream};
      request.transport.required = Option(args, "required", "") == "1";
      request.token_seed = absl::StrCat("seed of ", args[1]);
    } else if (!region.empty()) {
      request.transport.accept = {TransportKind::kHostMemory};
      request.transport.places = {{TensorId::kQ, RegionId(region), 0, 8}};
      request.transport.required = Option(args, "required", "") == "1";
    }
    const std::string deadline = Option(args, "deadline", "");
    if (!deadline.empty()) request.deadline = now_ + Duration(deadline);
    const std::string ttl = Option(args, "retain", "");
    if (!ttl.empty()) {
      request.retain = RequestArrived::Retain{absl::StrCat("h-", args[1]), Duration(ttl)};
    }
    if (const std::string data = Option(args, "inline", ""); !data.empty()) {
      request.inline_inputs =
          std::make_shared<const InlineTensors>(InlineTensors{{TensorId::kQ, data}});
    }
    request.terms.max_residual_bytes = own("residual_bytes");
    request.residual = Option(args, "residual", "");
    if (!request.residual.empty()) FillFromResidual(args, &request);
    Feed(request);
  }

  // Copies the Forward's values, as the edge does.
  void FillFromResidual(const Args& args, RequestArrived* request) {
    request->direction = Direction::kBackward;
    request->keep_residual = args.back() == "keep";
    const ResidualView view =
        core_.FindResidual(request->residual, request->principal, request->request_id);
    if (view.failure) return;
    request->spec = *view.spec;
    request->choice = view.choice;
  }

  static std::string RegionId(const std::string& name) {
    return name + std::string(16 - name.size(), '.');
  }

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
    v1::JoinRequest answer;
    std::string text;
    bool is_automatic = true;
    switch (message.message_case()) {
      case v1::JoinResponse::kExpectRegion:
      case v1::JoinResponse::kForgetRegion:
      case v1::JoinResponse::kRegistered:
        return;
      case v1::JoinResponse::kPrepare:
        text = absl::StrCat("prepare ", message.prepare().generation(), " rank ",
                            message.prepare().rank(), " of ", message.prepare().world_size());
        answer.mutable_prepared()->set_generation(message.prepare().generation());
        break;
      case v1::JoinResponse::kCommit:
        text = absl::StrCat("commit ", message.commit().generation(), " [",
                            absl::StrJoin(message.commit().blobs(), " "), "]");
        if (message.commit().hosts_size() > 0) {
          absl::StrAppend(&text, " hosts ", absl::StrJoin(message.commit().hosts(), " "));
        }
        answer.mutable_committed()->set_generation(message.commit().generation());
        break;
      case v1::JoinResponse::kTeardown:
        text = absl::StrCat("teardown ", message.teardown().generation());
        answer.mutable_torn_down()->set_generation(message.teardown().generation());
        worker->second.heartbeat.clear_operation_id();
        break;
      case v1::JoinResponse::kRelease:
        text = absl::StrCat("release ", message.release().operation_id(),
                            message.release().keep_residual() ? " keeping" : "");
        answer.mutable_released()->set_operation_id(message.release().operation_id());
        answer.mutable_released()->set_generation(message.release().generation());
        break;
      case v1::JoinResponse::kReserve:
        text = absl::StrCat("reserve ", message.reserve().operation_id(), " [",
                            absl::StrJoin(message.reserve().members(), " "), "]",
                            message.reserve().retain() ? " retain" : "",
                            message.reserve().residual().empty() ? "" : " reads ",
                            message.reserve().residual());
        if (message.reserve().has_inline_run()) {
          const v1::InlineRun& run = message.reserve().inline_run();
          absl::StrAppend(&text, " inline ", run.inputs(0).data(),
                          run.has_preempt_after() ? " preempting" : "");
        }
        RecordToken(name, message.reserve());
        is_automatic = false;
        break;
      case v1::JoinResponse::kRun:
        text = absl::StrCat("run ", message.run().operation_id(),
                            message.run().has_preempt_after() ? " preempting" : "");
        is_automatic = false;
        break;
      case v1::JoinResponse::kCancel:
        text = absl::StrCat("cancel ", message.cancel().operation_id());
        is_automatic = false;
        break;
      case v1::JoinResponse::kDropResiduals:
        text = absl::StrCat("drop ", absl::StrJoin(message.drop_residuals().operation_ids(), " "));
        is_automatic = false;
        break;
      case v1::JoinResponse::kKvReserve:
      case v1::JoinResponse::kKvOpen:
      case v1::JoinResponse::kKvSettle:
      case v1::JoinResponse::kKvFree:
        text = KvCommandText(message);
        is_automatic = false;
        break;
      case v1::JoinResponse::kLeave:
        text = absl::StrCat("leave: ", message.leave().reason());
        is_automatic = false;
        break;
      case v1::JoinResponse::MESSAGE_NOT_SET:
        std::abort();
    }
    if (is_automatic && !worker->second.manual) {
      if (!worker->second.silent) answers->push_back(WorkerMessage{send.connection, answer});
      return;
    }
    // Equal consecutive messages to several workers become one line.
    if (!lines_.empty() && lines_.back().second == text) {
      absl::StrAppend(&lines_.back().first, " ", name);
    } else {
      lines_.push_back({name, text});
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
    lines_.push_back(
        {StreamName(finish.stream), absl::StrCat("finished", handle.empty() ? "" : " ", handle,
                                                 reason.empty() ? "" : ", not kept: ", reason)});
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
  std::set<std::string> shared_;  // announced regions
  std::map<StreamId, PlanThis> held_plans_;
  ScenarioKvClients kv_clients_;
  std::map<std::pair<std::string, std::string>, std::string> tokens_;  // by worker, operation
  std::set<std::string> known_tokens_;
};

CoordinatorConfig DefaultConfig() {
  CoordinatorConfig config;
  config.version = "1";
  config.assembly_time_max = absl::ZeroDuration();
  return config;
}

// The configuration of "scenario NAME KEY=VALUE..."; the error names an unknown key.
absl::StatusOr<CoordinatorConfig> ConfigOf(const Args& args) {
  CoordinatorConfig config = DefaultConfig();
  for (size_t i = 2; i < args.size(); ++i) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    if (!SetConfig(pair.first, pair.second, &config)) {
      return absl::InvalidArgumentError(
          absl::StrCat("scenario ", args[1], ": unknown configuration key ", pair.first));
    }
  }
  return config;
}

// Expands "repeat N COMMAND ; COMMAND ..." with % as the number, or returns the command alone.
std::vector<std::string> Expand(const std::string& command) {
  const Args args = absl::StrSplit(command, ' ', absl::SkipEmpty());
  if (args[0] != "repeat") return {command};
  std::vector<std::string> commands;
  for (int i = 1; i <= std::atoi(args[1].c_str()); ++i) {
    const std::string text = absl::StrReplaceAll(Rest(args, 2), {{"%", absl::StrCat(i)}});
    for (absl::string_view one : absl::StrSplit(text, " ; ")) commands.emplace_back(one);
  }
  return commands;
}

// The text before a comment.
std::string CommandIn(absl::string_view line) {
  return std::string(absl::StripAsciiWhitespace(line.substr(0, line.find('#'))));
}

// Writes a scenario with the traces that really occurred.
class Transcript {
 public:
  void Add(absl::string_view line) { absl::StrAppend(&text_, line, "\n"); }
  // Ends a block of commands; no effect without one.
  void EndBlock(const ScenarioLines& trace) {
    Add("----");
    for (const auto& [who, text] : trace) Add(absl::StrCat(who, who.empty() ? "" : ": ", text));
    Add("");
  }
  std::string Take() && {
    while (absl::EndsWith(text_, "\n\n")) text_.pop_back();
    return std::move(text_);
  }

 private:
  std::string text_;
};

}  // namespace

std::vector<ScenarioSection> SplitScenarios(const std::string& file) {
  std::vector<ScenarioSection> sections(1);
  std::vector<std::string> comments;  // directly above the next scenario
  for (absl::string_view line : absl::StrSplit(file, '\n')) {
    if (absl::StartsWith(line, "#")) {
      comments.emplace_back(line);
      continue;
    }
    if (absl::StartsWith(line, "scenario ")) {
      const Args args = absl::StrSplit(CommandIn(line), ' ', absl::SkipEmpty());
      sections.push_back({args.size() > 1 ? args[1] : "", ""});
    }
    for (const std::string& comment : comments)
      absl::StrAppend(&sections.back().text, comment, "\n");
    comments.clear();
    absl::StrAppend(&sections.back().text, line, "\n");
  }
  for (ScenarioSection& section : sections) {
    while (absl::EndsWith(section.text, "\n")) section.text.pop_back();
    if (!section.text.empty()) section.text += "\n";
  }
  return sections;
}

std::string JoinScenarios(const std::vector<ScenarioSection>& sections) {
  std::string file;
  for (const ScenarioSection& section : sections) {
    if (section.text.empty()) continue;
    absl::StrAppend(&file, file.empty() ? "" : "\n", section.text);
  }
  return file;
}

absl::StatusOr<std::string> RunScenario(const ScenarioSection& section) {
  std::optional<Scenario> scenario;
  Transcript transcript;
  bool in_trace = false;  // skips the old trace
  bool in_block = false;  // commands without a trace so far
  for (absl::string_view line : absl::StrSplit(section.text, '\n')) {
    if (in_trace || line == "----") {
      if (line == "----" && in_block) transcript.EndBlock({});
      in_block = false;
      in_trace = !line.empty();
      continue;
    }
    const std::string command = CommandIn(line);
    if (command.empty()) {
      if (line.empty() && in_block) transcript.EndBlock({});
      if (!line.empty()) transcript.Add(line);
      if (line.empty()) in_block = false;
      continue;
    }
    transcript.Add(line);
    if (absl::StartsWith(command, "scenario ")) {
      const absl::StatusOr<CoordinatorConfig> config =
          ConfigOf(absl::StrSplit(command, ' ', absl::SkipEmpty()));
      if (!config.ok()) return config.status();
      scenario.emplace(*config);
      continue;
    }
    if (!scenario.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat("\"", line, "\" precedes every scenario"));
    }
    ScenarioLines trace;
    for (const std::string& one : Expand(command)) {
      const ScenarioLines lines = scenario->Run(one);
      for (const auto& [who, text] : lines) {
        if (absl::StartsWith(text, "unknown ")) return absl::InvalidArgumentError(text);
      }
      trace.insert(trace.end(), lines.begin(), lines.end());
    }
    in_block = trace.empty();
    if (!trace.empty()) transcript.EndBlock(trace);
  }
  return std::move(transcript).Take();
}

}  // namespace ringattn::server
