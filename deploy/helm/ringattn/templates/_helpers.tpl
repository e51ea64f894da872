{{/* Names and labels. */}}
{{- define "ringattn.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters leave room for the components' suffixes and a pod's ordinal. */}}
{{- define "ringattn.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "ringattn.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "ringattn.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.coordinatorName" -}}{{ include "ringattn.fullname" . }}-coordinator{{- end -}}
{{- define "ringattn.workerName" -}}{{ include "ringattn.fullname" . }}-worker{{- end -}}
{{- define "ringattn.controlName" -}}{{ include "ringattn.fullname" . }}-control{{- end -}}
{{- define "ringattn.workersName" -}}{{ include "ringattn.fullname" . }}-workers{{- end -}}

{{- define "ringattn.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ringattn.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "ringattn.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ringattn.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{/* {root, component} */}}
{{- define "ringattn.labels" -}}
{{ include "ringattn.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ringattn
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods. Without the chart's version, so that a new chart version alone restarts no pod. */}}
{{- define "ringattn.podLabels" -}}
{{ include "ringattn.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ringattn
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, labels, annotations of an object: {root, component, name, annotations, labels} */}}
{{- define "ringattn.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "ringattn.labels" (dict "root" .root "component" .component) | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ringattn.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The wildcard address: "0.0.0.0" or "[::]". */}}
{{- define "ringattn.anyHost" -}}{{ eq .Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}{{- end -}}
{{/* The pod's address, as written before a port. */}}
{{- define "ringattn.podHost" -}}{{ eq .Values.ipFamily "IPv6" | ternary "[$(POD_IP)]" "$(POD_IP)" }}{{- end -}}

{{- define "ringattn.clusterSecretName" -}}
{{- default (printf "%s-cluster" (include "ringattn.fullname" .)) .Values.cluster.existingSecret -}}
{{- end -}}
{{- define "ringattn.clientsSecretName" -}}
{{- default (printf "%s-clients" (include "ringattn.fullname" .)) .Values.clients.existingSecret -}}
{{- end -}}
{{- define "ringattn.hasClients" -}}
{{- if or .Values.clients.existingSecret .Values.clients.config }}true{{ end -}}
{{- end -}}

{{/* A quantity of memory in bytes: "4Gi", "500M", 1024. */}}
{{- define "ringattn.bytes" -}}
{{- $text := . | toString -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "" 1 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- if not (hasKey $units $unit) }}{{ fail (printf "memory quantity %q is not supported; use bytes with a suffix of Ki, Mi, Gi, Ti, k, M, G, T or none" $text) }}{{ end -}}
{{- mulf (trimSuffix $unit $text | float64) (get $units $unit) | floor | int64 -}}
{{- end -}}

{{/* Number of workers per pod. */}}
{{- define "ringattn.perPod" -}}
{{- eq .Values.worker.mode "gpu" | ternary .Values.worker.gpu.perPod 1 -}}
{{- end -}}

{{/* Checks that the schema cannot express. */}}
{{- define "ringattn.check" -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) }}{{ fail "tls.enabled needs tls.existingSecret: the public listener's kubernetes.io/tls Secret" }}{{ end -}}
{{- if and .Values.tls.enabled (not .Values.tls.clusterSecret) }}{{ fail "tls.enabled needs tls.clusterSecret: the kubernetes.io/tls Secret of coordinator and workers, with ca.crt" }}{{ end -}}
{{- if and (include "ringattn.hasClients" .) (not .Values.tls.enabled) }}{{ fail "clients needs tls.enabled: tokens and certificates prove nothing in plain text" }}{{ end -}}
{{- if and .Values.clients.existingSecret .Values.clients.config }}{{ fail "clients.existingSecret and clients.config exclude each other" }}{{ end -}}
{{- if and .Values.cluster.existingSecret .Values.cluster.secret }}{{ fail "cluster.existingSecret and cluster.secret exclude each other" }}{{ end -}}
{{- if and (ne .Values.worker.mode "gpu") (gt (int .Values.worker.gpu.perPod) 1) }}{{ fail "worker.gpu.perPod is for worker.mode=gpu" }}{{ end -}}
{{- if .Values.worker.gpu.peerSocketVolume }}{{ include "ringattn.checkPeerSockets" . }}{{ end -}}
{{- end -}}

{{- define "ringattn.checkPeerSockets" -}}
{{- $worker := .Values.worker -}}
{{- if ne $worker.mode "gpu" }}{{ fail "worker.gpu.peerSocketVolume is for worker.mode=gpu" }}{{ end -}}
{{- if gt (int $worker.gpu.perPod) 1 }}{{ fail "worker.gpu.peerSocketVolume is for pods of one GPU (worker.gpu.perPod=1): those of one pod meet without it" }}{{ end -}}
{{- if eq $worker.gpu.ringTransport "nccl" }}{{ fail "worker.gpu.peerSocketVolume has no effect with worker.gpu.ringTransport=nccl" }}{{ end -}}
{{- if eq $worker.spread "hard" }}{{ fail "worker.gpu.peerSocketVolume keeps the pods on one node and worker.spread=hard on one each" }}{{ end -}}
{{- if semverCompare "<1.28.0-0" .Capabilities.KubeVersion.Version }}{{ fail "worker.gpu.peerSocketVolume needs Kubernetes 1.28: before it pods do not know their number" }}{{ end -}}
{{- end -}}

{{/* A gRPC probe of the plain-text health port: {root, probe, service} */}}
{{- define "ringattn.probe" -}}
grpc:
  port: {{ .root.Values.ports.health }}
  service: {{ .service }}
{{ toYaml .probe }}
{{- end -}}

{{- define "ringattn.podIdentity" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* Secrets as directories. Single files (subPath) would never be updated. */}}
{{- define "ringattn.clusterMounts" -}}
- {name: cluster-secret, mountPath: /etc/ringattn/cluster, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: cluster-tls, mountPath: /etc/ringattn/cluster-tls, readOnly: true}
{{- end }}
{{- end -}}
{{- define "ringattn.clusterVolumes" -}}
- name: cluster-secret
  secret:
    secretName: {{ include "ringattn.clusterSecretName" . }}
    defaultMode: 0440
    items: [{key: {{ .Values.cluster.secretKey }}, path: secret}]
{{- if .Values.tls.enabled }}
- name: cluster-tls
  secret: {secretName: {{ .Values.tls.clusterSecret }}, defaultMode: 0440}
{{- end }}
{{- end -}}
{{- define "ringattn.clusterArgs" -}}
- --secret_file=/etc/ringattn/cluster/secret
{{- if .Values.tls.enabled }}
- --cluster_tls_cert=/etc/ringattn/cluster-tls/tls.crt
- --cluster_tls_key=/etc/ringattn/cluster-tls/tls.key
- --cluster_tls_ca=/etc/ringattn/cluster-tls/ca.crt
- --cluster_tls_server_name={{ .Values.tls.clusterServerName }}
{{- else }}
- --insecure
{{- end }}
{{- end -}}
