// The file that reports the coordinator's addresses.
// Tests: port_file_test.cc.
#ifndef RINGATTN_SERVER_PORT_FILE_H_
#define RINGATTN_SERVER_PORT_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "server/edge/server.h"

namespace ringattn::server {

// Writes the addresses as JSON. The file is replaced by a rename, so readers never see part of it.
// An empty path means no file.
//
// If the file cannot be written, for example because the disk is full, returns UNAVAILABLE if a
// port was chosen by the system, because then nobody can find the coordinator. If the options give
// every port, logs a warning and returns OK.
absl::Status WritePortFile(const std::string& path, const ServerOptions& options,
                           const ServerAddresses& addresses);

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_PORT_FILE_H_
