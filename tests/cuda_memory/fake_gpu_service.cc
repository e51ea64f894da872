// A coordinator and a GPU worker over the fake runtime, as a program: prints the coordinator's
// address and serves until its input ends.
//
//   fake_gpu_service cuda|host|off FOLDER     what the worker takes (--local_memory), and for its
//   socket
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/version.h"
#include "server/edge/server.h"
#include "worker/comm/single_rank/single_rank_transport.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/service/worker.h"

namespace ringattn {
namespace {

constexpr char kSecret[] = "a secret of some length";

absl::Status Serve(const std::string& takes, const std::string& folder) {
  server::ServerOptions options;
  options.listen = options.control_listen = "127.0.0.1:0";
  options.metrics_listen = "";
  options.secret = kSecret;
  options.core.version = kVersion;
  options.core.initial_generation = 1;
  options.core.forming_delay = absl::Milliseconds(20);
  auto server = server::Server::Start(std::move(options));
  if (!server.ok()) return server.status();
  auto device = worker::CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 << 20});
  if (!device.ok()) return device.status();
  worker::SingleRankTransport transport{absl::FailedPreconditionError("one worker")};
  worker::WorkerOptions work;
  work.name = "worker-0";
  work.coordinator = (*server)->addresses().control;
  work.secret = kSecret;
  work.metrics_listen = "";
  work.memory_limit_bytes = 1 << 30;
  if (takes != "off") {
    work.local_socket_path = absl::StrCat(folder, "/w.sock");
    work.local_uids = {geteuid()};
  }
  if (takes == "cuda") work.max_imported_bytes = int64_t{1} << 40;
  auto worker = worker::Worker::Start(
      work, device->get(), &transport, [](const std::string&) {}, [](const std::string&) {});
  if (!worker.ok()) return worker.status();
  std::cout << (*server)->addresses().listen << std::endl;
  std::string line;
  while (std::getline(std::cin, line)) {
  }
  worker->reset();
  server->reset();
  return absl::OkStatus();
}

}  // namespace
}  // namespace ringattn

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const absl::Status status = ringattn::Serve(argv[1], argv[2]);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
