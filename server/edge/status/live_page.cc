#include "server/edge/status/live_page.h"

#include <memory>
#include <string>
#include <utility>

#include "common/base/monotonic_time.h"
#include "server/edge/status/live_page_files.h"

namespace ringattn::server {
namespace {

// The core checks every 50 ms. Longer than any event takes to handle, short enough for a viewer.
constexpr absl::Duration kPatience = absl::Seconds(1);

std::function<HttpReply()> File(const char* content_type, std::string_view text) {
  return [content_type, text] {
    return HttpReply{.content_type = content_type, .body = std::string(text)};
  };
}

HttpReply Status(const StatusConstants& constants, StatusBoard* board) {
  const std::shared_ptr<const ServerStatus> status = board->Look(kPatience);
  if (status == nullptr) return {.status = 503, .body = "the core does not answer\n"};
  return {.content_type = "application/json",
          .body = StatusJson(constants, *status, MonotonicNow())};
}

}  // namespace

HttpRoutes LivePage(StatusConstants constants, StatusBoard* board) {
  return {{"/", File("text/html; charset=utf-8", live_page_files::kIndexHtml)},
          {"/page.css", File("text/css; charset=utf-8", live_page_files::kPageCss)},
          {"/page.js", File("text/javascript; charset=utf-8", live_page_files::kPageJs)},
          {"/status.json",
           [constants = std::move(constants), board] { return Status(constants, board); }}};
}

}  // namespace ringattn::server
