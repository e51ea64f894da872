#include "client/cli/trace.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"

namespace ringattn::cli {
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
           const std::string& category, double begin_seconds, double end_seconds) {
    list_.push_back({{"name", name},
                     {"cat", category},
                     {"ph", "X"},
                     {"ts", begin_seconds * 1e6},
                     {"dur", std::max(0.0, end_seconds - begin_seconds) * 1e6},
                     {"pid", process},
                     {"tid", RowId(process, row)}});
  }

  Json Take() { return {{"displayTimeUnit", "ms"}, {"traceEvents", std::move(list_)}}; }

 private:
  // Bars of one row must not overlap, so compute and exchange get rows of their own.
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

}  // namespace

Json TraceJson(const CallReport& report) {
  Events events;
  const ClientTimes& times = report.times;
  events.Process(kClientProcess, "client");
  events.Bar(kClientProcess, "call", "wait for Accepted", "queue", 0, times.accepted_seconds);
  const double uploaded = std::max(times.uploaded_seconds, times.accepted_seconds);
  events.Bar(kClientProcess, "call", "upload", "upload", times.accepted_seconds, uploaded);
  const double first_output =
      times.first_output_seconds > 0 ? times.first_output_seconds : times.finished_seconds;
  events.Bar(kClientProcess, "call", "wait for results", "compute", uploaded, first_output);
  events.Bar(kClientProcess, "call", "download", "download", first_output,
             times.finished_seconds);

  events.Process(kCoordinatorProcess, "coordinator");
  // The stages follow one another; only their lengths are reported. All but the queue
  // come after Accepted.
  double at = times.accepted_seconds;
  for (const v1::StageTime& stage : report.summary.stages()) {
    if (stage.stage() == "queue") {
      const double begin = std::max(0.0, times.accepted_seconds - stage.seconds());
      events.Bar(kCoordinatorProcess, "stages", "queue", "queue", begin, times.accepted_seconds);
      continue;
    }
    events.Bar(kCoordinatorProcess, "stages", stage.stage(), stage.stage(), at,
               at + stage.seconds());
    at += stage.seconds();
  }

  for (const v1::RankReport& rank : report.summary.ranks()) {
    const int process = kFirstRankProcess + static_cast<int>(rank.rank());
    events.Process(process, absl::StrCat("rank ", rank.rank(), " ", rank.worker()));
    for (const v1::TimelineEvent& event : rank.timeline()) {
      events.Bar(process, event.category(), event.name(), event.category(),
                 times.accepted_seconds + event.begin_seconds(),
                 times.accepted_seconds + event.end_seconds());
    }
  }
  return events.Take();
}

absl::Status WriteTrace(const std::string& path, const CallReport& report) {
  errno = 0;
  std::ofstream file(path, std::ios::trunc);
  file << TraceJson(report).dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
  file.close();
  if (file.fail()) return absl::ErrnoToStatus(errno != 0 ? errno : EIO, "--trace=" + path);
  return absl::OkStatus();
}

}  // namespace ringattn::cli
