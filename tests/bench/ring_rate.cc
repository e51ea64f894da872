// Rates of rings over sockets between two processes of this machine: this project's (wire) in plain
// text and TLS, Gloo's, and plain TCP as the bound. All run in turn, several times. Prints CSV.
//
//   ring_rate --rounds=5 --exchanges=4 > ring_rate.csv
//
// Columns: round, transport, connections, both_directions_bytes_per_second of exchanges of 64 MiB
// each way, exchange_us: the time of an exchange of 256 bytes each way.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/time/clock.h"
#include "common/security/test_certificates.h"
#include "worker/comm/contract/forked_ring.h"
#include "worker/comm/tcp/tcp_ring_transport.h"
#include "worker/comm/wire/wire_ring_transport.h"

ABSL_FLAG(int, rounds, 5, "how often each transport is measured");
ABSL_FLAG(int, exchanges, 16, "exchanges of 64 MiB per measurement");

namespace ringattn::worker {
namespace {

using Kind = PeerTransfer::Kind;

constexpr int64_t kBlockBytes = int64_t{64} << 20;
constexpr int64_t kSmallBytes = 256;
constexpr int kSmallExchanges = 2000;

void PrintRow(int round, const std::string& transport, int connections, absl::Duration blocks,
              absl::Duration small) {
  const double bytes = 2.0 * kBlockBytes * absl::GetFlag(FLAGS_exchanges);
  std::printf("%d,%s,%d,%.3e,%.1f\n", round, transport.c_str(), connections,
              bytes / absl::ToDoubleSeconds(blocks),
              absl::ToDoubleMicroseconds(small) / kSmallExchanges);
  std::fflush(stdout);
}

using Exchange = std::function<bool(char* out, char* in, int64_t bytes)>;

// Returns the times of all long and of all short exchanges, or false if one failed.
bool Measure(const Exchange& exchange, absl::Duration* blocks, absl::Duration* small) {
  std::vector<char> out(kBlockBytes, 1), in(kBlockBytes, 2);
  if (!exchange(out.data(), in.data(), kBlockBytes)) return false;
  absl::Time begin = absl::Now();
  for (int i = 0; i < absl::GetFlag(FLAGS_exchanges); ++i) {
    if (!exchange(out.data(), in.data(), kBlockBytes)) return false;
  }
  *blocks = absl::Now() - begin;
  begin = absl::Now();
  for (int i = 0; i < kSmallExchanges; ++i) {
    if (!exchange(out.data(), in.data(), kSmallBytes)) return false;
  }
  *small = absl::Now() - begin;
  return true;
}

void MeasureRing(int round, const std::string& name, int connections,
                 const std::function<std::unique_ptr<RingTransport>()>& make_transport) {
  ForkedRing ring(2, make_transport, [&](Communicator& communicator) {
    const int peer = 1 - communicator.rank();
    RunControl control;
    absl::Duration blocks, small;
    const bool ok = Measure(
        [&](char* out, char* in, int64_t bytes) {
          EventRef done = communicator.Start(
              {{Kind::kSend, peer, out, bytes}, {Kind::kReceive, peer, in, bytes}}, {}, &control);
          return done->Wait(absl::Now() + absl::Minutes(1)).ok();
        },
        &blocks, &small);
    if (ok && peer == 1) PrintRow(round, name, connections, blocks, small);
    return ok ? 0 : 1;
  });
  ring.ExpectSuccess();
}

bool MoveAll(int fd, char* data, int64_t bytes, bool out) {
  while (bytes > 0) {
    const auto most = static_cast<size_t>(std::min<int64_t>(bytes, 1 << 20));
    const ssize_t moved = out ? write(fd, data, most) : read(fd, data, most);
    if (moved <= 0) return false;
    data += moved;
    bytes -= moved;
  }
  return true;
}

// One connection; one thread per direction for blocks.
void MeasurePlainTcp(int round) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    std::perror("listening");
    std::exit(1);
  }
  pid_t children[2];
  for (int side : {0, 1}) {
    children[side] = fork();
    if (children[side] != 0) continue;
    int fd = -1;
    if (side == 0) {
      fd = accept(listener, nullptr, nullptr);
    } else {
      fd = socket(AF_INET, SOCK_STREAM, 0);
      if (connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) _exit(1);
    }
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    absl::Duration blocks, small;
    const bool ok = Measure(
        [&](char* out, char* in, int64_t bytes) {
          if (bytes <= kSmallBytes) {
            return MoveAll(fd, out, bytes, true) && MoveAll(fd, in, bytes, false);
          }
          bool sent = false;
          std::thread sender([&] { sent = MoveAll(fd, out, bytes, true); });
          const bool received = MoveAll(fd, in, bytes, false);
          sender.join();
          return sent && received;
        },
        &blocks, &small);
    if (ok && side == 0) PrintRow(round, "plain_tcp", 1, blocks, small);
    _exit(ok ? 0 : 1);
  }
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::fprintf(stderr, "plain TCP failed\n");
  }
  close(listener);
}

void MeasureAll() {
  const TestAuthority authority("cluster");
  const TestCertificate issued = authority.Issue("worker");
  const TlsMaterial material{.identity_pem = issued.key + issued.certificate,
                             .authorities_pem = authority.pem()};
  std::printf("round,transport,connections,both_directions_bytes_per_second,exchange_us\n");
  std::fflush(stdout);
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    MeasurePlainTcp(round);
    MeasureRing(round, "gloo", 1,
                [] { return std::make_unique<TcpRingTransport>(TcpTransportOptions{}); });
    for (const int connections : {1, 2, 4, 8}) {
      MeasureRing(round, "wire", connections, [&] {
        return std::make_unique<WireRingTransport>(
            WireTransportOptions{.connections = connections});
      });
    }
    for (const int connections : {1, 2, 4}) {
      MeasureRing(round, "wire_tls", connections, [&] {
        return std::make_unique<WireRingTransport>(
            WireTransportOptions{.connections = connections, .tls = [&] { return material; }});
      });
    }
  }
}

}  // namespace
}  // namespace ringattn::worker

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  ringattn::worker::MeasureAll();
  return 0;
}
