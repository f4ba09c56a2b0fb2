// The network between emulated hosts: each sends into a tun device, and the packets come out of another's, later.
//
//     relay INTERFACE DELAY_S RATE_BYTES_S QUEUE_BYTES LOSS SEED NAMESPACE=ADDRESS ...
//
// Each host sends at RATE_BYTES_S from a queue of QUEUE_BYTES, and drops what does not fit. A packet arrives DELAY_S
// after its last byte has left; a share LOSS of them does not arrive. Which ones depends on SEED, the host, and how
// many packets it has sent before. The host that receives has no limit. Only IPv4 between the addresses is forwarded.
//
// Prints "ready" once all devices exist. They vanish with this process, which ends when its standard input does.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 64, MAX_PACKET_BYTES = 65536, IPV4_HEADER_BYTES = 20, BATCH = 64 };

struct packet {
  struct packet* next;
  double due;
  int to;
  size_t n_bytes;
  unsigned char bytes[];
};

struct host {
  int device;
  in_addr_t address;
  uint64_t random;
  double idle_at;  // when all accepted bytes have left
  struct packet *first, **end;
};

struct network {
  double delay, rate, queue_bytes, loss;
  int n_hosts;
  struct host hosts[MAX_HOSTS];
};

static void fail(const char* what) {
  fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
  exit(1);
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// SplitMix64 (Steele, Lea and Flood, 2014), as a number in [0, 1).
static double draw(uint64_t* state) {
  uint64_t x = *state += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return (double)((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

static int open_device(const char* interface, const char* name_space) {
  char path[256];
  snprintf(path, sizeof path, "/run/netns/%s", name_space);
  int place = open(path, O_RDONLY | O_CLOEXEC);
  if (place < 0 || setns(place, CLONE_NEWNET) != 0) fail(path);
  close(place);
  int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  snprintf(request.ifr_name, sizeof request.ifr_name, "%s", interface);
  if (ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  return device;
}

// The number of the host to which a packet goes; -1: to none.
static int destination(const struct network* net, const unsigned char* bytes, size_t n_bytes) {
  if (n_bytes < IPV4_HEADER_BYTES || bytes[0] >> 4 != 4) return -1;
  in_addr_t address;
  memcpy(&address, bytes + 16, sizeof address);
  for (int i = 0; i < net->n_hosts; i++)
    if (net->hosts[i].address == address) return i;
  return -1;
}

static void accept_packet(struct network* net, struct host* from, const unsigned char* bytes, size_t n_bytes) {
  int to = destination(net, bytes, n_bytes);
  if (to < 0) return;
  double lost = draw(&from->random), time = now();
  double begin = from->idle_at > time ? from->idle_at : time;
  if ((begin - time) * net->rate + (double)n_bytes > net->queue_bytes) return;
  from->idle_at = begin + (double)n_bytes / net->rate;
  if (lost < net->loss) return;  // on the way: it has used the link
  struct packet* packet = malloc(sizeof *packet + n_bytes);
  if (packet == NULL) fail("malloc");
  packet->next = NULL;
  packet->due = from->idle_at + net->delay;
  packet->to = to;
  packet->n_bytes = n_bytes;
  memcpy(packet->bytes, bytes, n_bytes);
  *from->end = packet;
  from->end = &packet->next;
}

// Delivers what is due; returns when the next packet is, at `latest` if there is none.
static double deliver(struct network* net, double latest) {
  double time = now();
  for (int i = 0; i < net->n_hosts; i++) {
    struct host* from = &net->hosts[i];
    struct packet* packet;
    while ((packet = from->first) != NULL && packet->due <= time) {
      // A device that is down refuses the packet, which is then lost, as in a network.
      ssize_t written = write(net->hosts[packet->to].device, packet->bytes, packet->n_bytes);
      (void)written;
      from->first = packet->next;
      if (from->first == NULL) from->end = &from->first;
      free(packet);
    }
    if (packet != NULL && packet->due < latest) latest = packet->due;
  }
  return latest;
}

static void forward(struct network* net) {
  static unsigned char bytes[MAX_PACKET_BYTES];
  struct pollfd polled[MAX_HOSTS + 1];
  polled[net->n_hosts] = (struct pollfd){.fd = STDIN_FILENO, .events = POLLIN};
  for (int i = 0; i < net->n_hosts; i++) polled[i] = (struct pollfd){.fd = net->hosts[i].device, .events = POLLIN};
  for (;;) {
    double wait = deliver(net, now() + 1.0) - now();
    if (wait < 0.0) wait = 0.0;
    struct timespec timeout = {.tv_sec = (time_t)wait};
    timeout.tv_nsec = (long)((wait - (double)timeout.tv_sec) * 1e9);
    if (ppoll(polled, (nfds_t)net->n_hosts + 1, &timeout, NULL) < 0 && errno != EINTR) fail("ppoll");
    if (polled[net->n_hosts].revents != 0) return;
    for (int i = 0; i < net->n_hosts; i++) {
      if ((polled[i].revents & POLLIN) == 0) continue;
      for (int k = 0; k < BATCH; k++) {
        ssize_t n_bytes = read(net->hosts[i].device, bytes, sizeof bytes);
        if (n_bytes <= 0) break;
        accept_packet(net, &net->hosts[i], bytes, (size_t)n_bytes);
      }
    }
  }
}

int main(int n_words, char** words) {
  enum { FIRST = 7 };
  if (n_words < FIRST + 2 || n_words > FIRST + MAX_HOSTS) {
    fprintf(stderr, "usage: relay INTERFACE DELAY_S RATE_BYTES_S QUEUE_BYTES LOSS SEED NAMESPACE=ADDRESS ...\n");
    return 2;
  }
  static struct network net;
  net.delay = strtod(words[2], NULL);
  net.rate = strtod(words[3], NULL);
  net.queue_bytes = strtod(words[4], NULL);
  net.loss = strtod(words[5], NULL);
  net.n_hosts = n_words - FIRST;
  for (int i = 0; i < net.n_hosts; i++) {
    struct host* host = &net.hosts[i];
    char* address = strchr(words[FIRST + i], '=');
    if (address == NULL || inet_pton(AF_INET, address + 1, &host->address) != 1) {
      fprintf(stderr, "relay: %s is not NAMESPACE=ADDRESS\n", words[FIRST + i]);
      return 2;
    }
    *address = '\0';
    host->device = open_device(words[1], words[FIRST + i]);
    host->end = &host->first;
    host->random = strtoull(words[6], NULL, 10);
    for (int k = 0; k <= i; k++) host->random = (uint64_t)(draw(&host->random) * 0x1p53);
  }
  // A network waits for no core.
  struct sched_param priority = {.sched_priority = 1};
  if (sched_setscheduler(0, SCHED_FIFO, &priority) != 0)
    fprintf(stderr, "relay: no real-time priority (%s): packets are late where cores are busy\n", strerror(errno));
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  puts("ready");
  fflush(stdout);
  forward(&net);
  return 0;
}
