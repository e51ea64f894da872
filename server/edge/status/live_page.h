// The live page's files by path. "/" draws "/status.json"; all other files are constant.
#ifndef RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_
#define RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_

#include "common/observability/http_server.h"
#include "server/edge/status/status_board.h"
#include "server/edge/status/status_json.h"

namespace ringattn::server {

// `board` must outlive the server of these routes.
HttpRoutes LivePage(StatusConstants constants, StatusBoard* board);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_STATUS_LIVE_PAGE_H_
