// The first process of a node and of every pod: holds the namespaces and reaps orphans.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void End(int signal) {
  (void)signal;
  _exit(0);
}

static void Reap(int signal) {
  (void)signal;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

int main(void) {
  signal(SIGINT, End);
  signal(SIGTERM, End);
  signal(SIGCHLD, Reap);
  for (;;) pause();
}
