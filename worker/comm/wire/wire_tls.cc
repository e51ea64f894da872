// TLS 1.3 streams by OpenSSL.
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/comm/wire/wire_stream.h"

namespace ringattn::worker {
namespace {

// A TLS record. Parts that fit into one are sent as one.
constexpr size_t kRecordBytes = 16384;
// Records that one system call sends or receives. Every connection has a buffer of this size, and
// one more once it sends: 16 MiB in a ring of 64 workers with two connections each.
constexpr size_t kBatchBytes = 64 << 10;
constexpr size_t kBindingBytes = 32;
constexpr char kBindingLabel[] = "EXPERIMENTAL-ringattn-wire";
// The first is the fastest on processors with AES instructions.
constexpr char kCiphers[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

struct FreeOpenSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using OpenSslPtr = std::unique_ptr<T, FreeOpenSsl>;

// Appends to the std::string that is the BIO's data.
int AppendToOutput(BIO* bio, const char* data, int bytes) {
  static_cast<std::string*>(BIO_get_data(bio))->append(data, static_cast<size_t>(bytes));
  return bytes;
}

long ControlOutput(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO* NewOutput(std::string* output) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "output");
    if (made == nullptr) std::abort();  // out of memory
    BIO_meth_set_write(made, AppendToOutput);
    BIO_meth_set_ctrl(made, ControlOutput);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  if (bio == nullptr) std::abort();
  BIO_set_data(bio, output);
  BIO_set_init(bio, 1);
  return bio;
}

// OpenSSL would make a system call per record of 16 KiB, and two to read one. So records are
// encrypted into a buffer that is sent at once, and reads take what has arrived.
class TlsStream : public WireStream {
 public:
  TlsStream(int fd, OpenSslPtr<SSL> ssl) : WireStream(fd), ssl_(std::move(ssl)) {
    BIO* const input = BIO_new_socket(fd, BIO_NOCLOSE);
    if (input == nullptr) std::abort();
    SSL_set_bio(ssl_.get(), input, NewOutput(&output_));
  }

  Result Handshake() override {
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl_.get());
    Result result = done == 1 ? Result{.bytes = 1} : ResultOf(done);
    // A failure must reach the peer, too.
    const Result sent = SendOutput();
    if (result.ok() && (!sent.ok() || WantsWrite())) return sent;
    return result;
  }

  std::string Binding() override {
    std::string binding(kBindingBytes, '\0');
    const int done = SSL_export_keying_material(
        ssl_.get(), reinterpret_cast<unsigned char*>(binding.data()), binding.size(), kBindingLabel,
        sizeof(kBindingLabel) - 1, nullptr, 0, 0);
    // Without the binding the proof of the token would be worth less than in plain text.
    if (done != 1) std::abort();
    return binding;
  }

  Result Read(char* data, size_t bytes) override {
    size_t got = 0;
    ERR_clear_error();
    const int done = SSL_read_ex(ssl_.get(), data, bytes, &got);
    Result result = done == 1 ? Result{.bytes = got} : ResultOf(done);
    if (result.ok() && WantsWrite()) {  // an answer of TLS itself
      const Result sent = SendOutput();
      if (!sent.ok()) return sent;
    }
    return result;
  }

  // Bytes count as written once their records have left the buffer.
  Result Write(const iovec* parts, int count) override {
    if (encrypted_bytes_ == 0) {
      const Result encrypted = Encrypt(parts, count);
      if (!encrypted.ok()) return encrypted;
    }
    const Result sent = SendOutput();
    if (!sent.ok() || WantsWrite()) return sent;
    return {.bytes = std::exchange(encrypted_bytes_, 0)};
  }

  bool HasBuffered() const override { return SSL_has_pending(ssl_.get()) == 1; }
  bool WantsWrite() const override { return sent_ < output_.size(); }
  Result Flush() override { return SendOutput(); }

 private:
  Result Encrypt(const iovec* parts, int count) {
    size_t total = 0;
    for (int i = 0; i < count; ++i) total += parts[i].iov_len;
    char record[kRecordBytes];
    iovec joined{record, 0};
    if (count > 1 && total <= sizeof(record)) {
      for (int i = 0; i < count; ++i) {
        std::memcpy(record + joined.iov_len, parts[i].iov_base, parts[i].iov_len);
        joined.iov_len += parts[i].iov_len;
      }
      parts = &joined;
      count = 1;
    }
    for (int i = 0; i < count; ++i) {
      const char* const data = static_cast<const char*>(parts[i].iov_base);
      for (size_t at = 0; at < parts[i].iov_len && output_.size() < kBatchBytes;) {
        size_t done_bytes = 0;
        ERR_clear_error();
        const int done = SSL_write_ex(ssl_.get(), data + at,
                                      std::min(kRecordBytes, parts[i].iov_len - at), &done_bytes);
        if (done != 1) return ResultOf(done);
        at += done_bytes;
        encrypted_bytes_ += done_bytes;
      }
    }
    return {};
  }

  // Sends what the socket takes of the buffer. Returns no bytes.
  Result SendOutput() {
    while (sent_ < output_.size()) {
      const iovec part{output_.data() + sent_, output_.size() - sent_};
      Result result = WireStream::Write(&part, 1);
      if (!result.ok() || result.bytes == 0) return result;
      sent_ += result.bytes;
    }
    output_.clear();
    sent_ = 0;
    return {};
  }

  Result ResultOf(int done) const {
    const int system_error = errno;
    const int error = SSL_get_error(ssl_.get(), done);
    if (error == SSL_ERROR_WANT_WRITE || error == SSL_ERROR_WANT_READ) return {};
    const unsigned long detail = ERR_peek_error();
    ERR_clear_error();
    if (error == SSL_ERROR_SYSCALL && system_error != 0) return Failed(system_error);
    const bool ended = error == SSL_ERROR_ZERO_RETURN || error == SSL_ERROR_SYSCALL ||
                       ERR_GET_REASON(detail) == SSL_R_UNEXPECTED_EOF_WHILE_READING;
    if (ended) return {.failure = WireFailure::kClosed, .why = "the peer closed the connection"};
    const long verified = SSL_get_verify_result(ssl_.get());
    const char* const reason = ERR_reason_error_string(detail);
    std::string why = absl::StrCat("TLS: ", reason != nullptr ? reason : "unknown error");
    if (verified != X509_V_OK) {
      absl::StrAppend(&why, " (", X509_verify_cert_error_string(verified), ")");
    }
    return {.failure = WireFailure::kTls, .why = std::move(why)};
  }

  std::string output_;          // records; outlives ssl_, which appends to it
  size_t sent_ = 0;             // of output_
  size_t encrypted_bytes_ = 0;  // of the write whose records are in output_
  const OpenSslPtr<SSL> ssl_;
};

class OpenSslTls : public WireTls {
 public:
  explicit OpenSslTls(OpenSslPtr<SSL_CTX> context) : context_(std::move(context)) {}

  std::unique_ptr<WireStream> Wrap(int fd, bool connector) override {
    OpenSslPtr<SSL> ssl(SSL_new(context_.get()));
    if (ssl == nullptr) std::abort();  // out of memory
    if (connector) {
      SSL_set_connect_state(ssl.get());
    } else {
      SSL_set_accept_state(ssl.get());
    }
    return std::make_unique<TlsStream>(fd, std::move(ssl));
  }

 private:
  const OpenSslPtr<SSL_CTX> context_;
};

OpenSslPtr<BIO> OpenPem(const std::string& pem) {
  return OpenSslPtr<BIO>(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// Without this, OpenSSL would prompt for a pass phrase. ReadTlsFiles rejects keys that need one.
int NoPassPhraseForWire(char*, int, int, void*) { return -1; }

bool UseIdentity(const std::string& pem, SSL_CTX* context) {
  const OpenSslPtr<BIO> keys = OpenPem(pem), certificates = OpenPem(pem);
  const OpenSslPtr<EVP_PKEY> key(
      PEM_read_bio_PrivateKey(keys.get(), nullptr, NoPassPhraseForWire, nullptr));
  const OpenSslPtr<X509> own(
      PEM_read_bio_X509(certificates.get(), nullptr, NoPassPhraseForWire, nullptr));
  if (key == nullptr || own == nullptr) return false;
  if (SSL_CTX_use_certificate(context, own.get()) != 1) return false;
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1) return false;
  while (true) {
    const OpenSslPtr<X509> next(
        PEM_read_bio_X509(certificates.get(), nullptr, NoPassPhraseForWire, nullptr));
    if (next == nullptr) return true;
    if (SSL_CTX_add1_chain_cert(context, next.get()) != 1) return false;
  }
}

bool UseAuthorities(const std::string& pem, SSL_CTX* context) {
  const OpenSslPtr<BIO> bio = OpenPem(pem);
  X509_STORE* const store = SSL_CTX_get_cert_store(context);
  // An authority may be an intermediate one, as for gRPC.
  X509_STORE_set_flags(store, X509_V_FLAG_PARTIAL_CHAIN | X509_V_FLAG_TRUSTED_FIRST);
  bool any = false;
  while (true) {
    const OpenSslPtr<X509> next(
        PEM_read_bio_X509(bio.get(), nullptr, NoPassPhraseForWire, nullptr));
    if (next == nullptr) return any;
    if (X509_STORE_add_cert(store, next.get()) != 1) return false;
    any = true;
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<WireTls>> WireTls::Make(const TlsMaterial& material) {
  OpenSslPtr<SSL_CTX> context(SSL_CTX_new(TLS_method()));
  if (context == nullptr) return absl::InternalError("SSL_CTX_new failed");
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  SSL_CTX_set_ciphersuites(context.get(), kCiphers);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  SSL_CTX_set_read_ahead(context.get(), 1);
  SSL_CTX_set_default_read_buffer_len(context.get(), kBatchBytes);
  // Connections are never resumed.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  const bool usable = UseIdentity(material.identity_pem, context.get()) &&
                      UseAuthorities(material.authorities_pem, context.get());
  ERR_clear_error();
  if (!usable) {
    return absl::InvalidArgumentError(
        "TLS between workers needs a certificate, its key and authorities");
  }
  return std::make_shared<OpenSslTls>(std::move(context));
}

}  // namespace ringattn::worker
