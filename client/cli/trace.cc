#include "client/cli/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/flags.h"
#include "common/wire/durations.h"
#include "nlohmann/json.hpp"

namespace ringattn::client::cli {
namespace {

constexpr int kClientProcess = 1;
constexpr int kCoordinatorProcess = 2;
constexpr int kFirstRankProcess = 10;

class Events {
 public:
  void Process(int process, const std::string& name) {
    list_.push_back({{"name", "process_name"},
                     {"ph", "M"},
                     {"pid", process},
                     {"tid", 0},
                     {"args", {{"name", name}}}});
    list_.push_back({{"name", "process_sort_index"},
                     {"ph", "M"},
                     {"pid", process},
                     {"tid", 0},
                     {"args", {{"sort_index", process}}}});
  }

  void Bar(int process, const std::string& row, const std::string& name,
           const std::string& category, double begin_seconds, double end_seconds,
           const Json& arguments) {
    list_.push_back({{"name", name},
                     {"cat", category},
                     {"ph", "X"},
                     {"ts", begin_seconds * 1e6},
                     {"dur", std::max(0.0, end_seconds - begin_seconds) * 1e6},
                     {"pid", process},
                     {"tid", RowId(process, row)}});
    if (!arguments.empty()) list_.back()["args"] = arguments;
  }

  // Adds the names by which the service's logs know the call, and its transport.
  Json Take(const CallReport& report) {
    const v1::Accepted& accepted = report.accepted;
    return {{"displayTimeUnit", "ms"},
            {"otherData",
             {{"request_id", accepted.request_id()},
              {"traceparent", accepted.traceparent()},
              {"transport", ShortName(accepted.transport())},
              {"transport_reason", report.transport_reason}}},
            {"traceEvents", std::move(list_)}};
  }

 private:
  // Bars of one row must not overlap, so compute and exchange have separate rows.
  int RowId(int process, const std::string& row) {
    const auto [found, is_new] = rows_.emplace(std::pair(process, row), rows_.size() + 1);
    if (is_new) {
      list_.push_back({{"name", "thread_name"},
                       {"ph", "M"},
                       {"pid", process},
                       {"tid", found->second},
                       {"args", {{"name", row}}}});
    }
    return found->second;
  }

  Json list_ = Json::array();
  std::map<std::pair<int, std::string>, int> rows_;
};

// The bars of one call.
class CallBars {
 public:
  CallBars(Events& events, const CallReport& report) : events_(events), report_(report) {}

  void Client() {
    const ClientTimes& times = report_.times;
    const double uploaded = std::max(times.uploaded_seconds, times.accepted_seconds);
    const double first_output =
        times.first_output_seconds > 0 ? times.first_output_seconds : times.finished_seconds;
    Bar(kClientProcess, "call", "wait for Accepted", "queue", 0, times.accepted_seconds);
    Bar(kClientProcess, "call", "upload", "upload", times.accepted_seconds, uploaded,
        {{"transport", ShortName(report_.accepted.transport())},
         {"reason", report_.transport_reason}});
    Bar(kClientProcess, "call", "wait for results", "compute", uploaded, first_output);
    Bar(kClientProcess, "call", "download", "download", first_output, times.finished_seconds);
  }

  // Stages follow one another, and only their lengths are reported. All except the queue come after
  // Accepted.
  void Coordinator() {
    const double accepted = report_.times.accepted_seconds;
    double at = accepted;
    for (const v1::StageTime& stage : report_.summary.stages()) {
      if (stage.stage() == v1::STAGE_QUEUE) {
        const double begin = std::max(0.0, accepted - ToSeconds(stage.time()));
        Bar(kCoordinatorProcess, "stages", "queue", "queue", begin, accepted);
        continue;
      }
      const std::string name = ShortName(stage.stage());
      Bar(kCoordinatorProcess, "stages", name, name, at, at + ToSeconds(stage.time()));
      at += ToSeconds(stage.time());
    }
  }

  void Rank(int process, const v1::RankReport& rank) {
    const double accepted = report_.times.accepted_seconds;
    for (const v1::TimelineEvent& event : rank.timeline()) {
      const std::string category = ShortName(event.category());
      Json arguments = Json::object();
      if (!event.kernel_family().empty()) {
        arguments = {{"family", event.kernel_family()}, {"class", event.kernel_class()}};
      }
      Bar(process, category, event.name(), category, accepted + ToSeconds(event.begin()),
          accepted + ToSeconds(event.end()), arguments);
    }
  }

 private:
  void Bar(int process, const std::string& row, const std::string& name,
           const std::string& category, double begin_seconds, double end_seconds,
           const Json& arguments = Json::object()) {
    events_.Bar(process, row, name, category, begin_seconds, end_seconds, arguments);
  }

  Events& events_;
  const CallReport& report_;
};

}  // namespace

Json TraceJson(const CallReport& report) {
  Events events;
  CallBars bars(events, report);
  events.Process(kClientProcess, "client");
  bars.Client();
  events.Process(kCoordinatorProcess, "coordinator");
  bars.Coordinator();
  for (const v1::RankReport& rank : report.summary.ranks()) {
    const int process = kFirstRankProcess + static_cast<int>(rank.rank());
    events.Process(process, absl::StrCat("rank ", rank.rank(), " ", rank.worker()));
    bars.Rank(process, rank);
  }
  return events.Take(report);
}

absl::StatusOr<TraceFile> TraceFile::Open(const std::string& path) {
  TraceFile file;
  if (path.empty()) return file;
  file.path_ = path;
  file.descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  file.made_ = file.descriptor_ >= 0;
  if (!file.made_) file.descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file.descriptor_ < 0) return absl::ErrnoToStatus(errno, "--trace=" + path);
  return file;
}

TraceFile::TraceFile(TraceFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      made_(std::exchange(other.made_, false)) {}

TraceFile::~TraceFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (made_) unlink(path_.c_str());
}

absl::Status TraceFile::Write(const CallReport& report) {
  if (descriptor_ < 0) return absl::OkStatus();
  const std::string text =
      TraceJson(report).dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  // Only regular files can be truncated; pipes and devices return EINVAL.
  if (ftruncate(descriptor_, 0) != 0 && errno != EINVAL) {
    return absl::ErrnoToStatus(errno, "--trace=" + path_);
  }
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(descriptor_, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::ErrnoToStatus(count < 0 ? errno : EIO, "--trace=" + path_);
    done += static_cast<size_t>(count);
  }
  made_ = false;
  const int closed = close(std::exchange(descriptor_, -1));
  return closed == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, "--trace=" + path_);
}

}  // namespace ringattn::client::cli
