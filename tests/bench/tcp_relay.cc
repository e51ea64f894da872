#include "tests/bench/tcp_relay.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace ringattn::bench {
namespace {

constexpr int64_t kBufferBytes = 1 << 20;

[[noreturn]] void Die(const char* what) {
  std::perror(what);
  std::_Exit(2);
}

struct Sizes {
  int64_t up;
  int64_t down;
};

// Reads exactly `bytes`; false at the end of the stream.
bool ReadAll(int fd, void* data, int64_t bytes) {
  for (char* at = static_cast<char*>(data); bytes > 0;) {
    const ssize_t n = read(fd, at, bytes);
    if (n <= 0) return false;
    at += n;
    bytes -= n;
  }
  return true;
}

void WriteAll(int fd, const void* data, int64_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n <= 0) Die("send");
    at += n;
    bytes -= n;
  }
}

void Produce(int fd, int64_t bytes, std::vector<char>& buffer) {
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kBufferBytes);
    WriteAll(fd, buffer.data(), part);
    bytes -= part;
  }
}

void Consume(int fd, int64_t bytes, std::vector<char>& buffer) {
  while (bytes > 0) {
    const int64_t part = std::min(bytes, kBufferBytes);
    if (!ReadAll(fd, buffer.data(), part)) Die("read");
    bytes -= part;
  }
}

void Copy(int from, int to, int64_t bytes, std::vector<char>& buffer) {
  while (bytes > 0) {
    const ssize_t n = read(from, buffer.data(), std::min(bytes, kBufferBytes));
    if (n <= 0) Die("relay read");
    WriteAll(to, buffer.data(), n);
    bytes -= n;
  }
}

int Listen(int* port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(fd, 16) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    Die("listen");
  }
  *port = ntohs(address.sin_port);
  return fd;
}

int Dial(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    Die("connect");
  }
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

template <typename Serve>
pid_t Fork(int listener, const Serve& serve) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  while (true) {
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) Die("accept");
    std::thread([fd, serve] {
      serve(fd);
      close(fd);
    }).detach();
  }
}

double ExchangeAt(int port, int streams, int64_t bytes_up, int64_t bytes_down) {
  std::vector<int> sockets;
  for (int i = 0; i < streams; ++i) sockets.push_back(Dial(port));
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (const int fd : sockets) {
    threads.emplace_back([=] {
      std::vector<char> buffer(kBufferBytes, 'x');
      const Sizes sizes{bytes_up, bytes_down};
      WriteAll(fd, &sizes, sizeof(sizes));
      Produce(fd, bytes_up, buffer);
      Consume(fd, bytes_down, buffer);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto end = std::chrono::steady_clock::now();
  for (const int fd : sockets) close(fd);
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

TcpRelay::TcpRelay() {
  const int sink_listener = Listen(&sink_port_);
  sink_ = Fork(sink_listener, [](int fd) {
    std::vector<char> buffer(kBufferBytes);
    Sizes sizes;
    while (ReadAll(fd, &sizes, sizeof(sizes))) {
      Consume(fd, sizes.up, buffer);
      Produce(fd, sizes.down, buffer);
    }
  });
  const int relay_listener = Listen(&port_);
  relay_ = Fork(relay_listener, [sink_port = sink_port_](int fd) {
    std::vector<char> buffer(kBufferBytes);
    const int sink = Dial(sink_port);
    Sizes sizes;
    while (ReadAll(fd, &sizes, sizeof(sizes))) {
      WriteAll(sink, &sizes, sizeof(sizes));
      Copy(fd, sink, sizes.up, buffer);
      Copy(sink, fd, sizes.down, buffer);
    }
    close(sink);
  });
  close(sink_listener);
  close(relay_listener);
}

TcpRelay::~TcpRelay() {
  for (const pid_t pid : {sink_, relay_}) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

double TcpRelay::Exchange(int streams, int64_t bytes_up, int64_t bytes_down) const {
  return ExchangeAt(port_, streams, bytes_up, bytes_down);
}

double TcpRelay::ExchangeWithSink(int streams, int64_t bytes_up, int64_t bytes_down) const {
  return ExchangeAt(sink_port_, streams, bytes_up, bytes_down);
}

}  // namespace ringattn::bench
