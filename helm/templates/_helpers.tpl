{{- define "pdserve.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* (dict "root" $ "component" "router") */ -}}
{{- define "pdserve.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- if .component }}
app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- end -}}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selector" . }}
app.kubernetes.io/part-of: pdserve
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "pdserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "pdserve.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "pdserve.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "pdserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "pdserve.redisEnv" -}}
- name: PDSERVE_REDIS_URL
  {{- if .Values.redis.existingSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret.name }}
      key: {{ .Values.redis.existingSecret.key }}
  {{- else if .Values.redis.url }}
  value: {{ .Values.redis.url | quote }}
  {{- else }}
  value: redis://{{ include "pdserve.fullname" . }}-redis:6379/0
  {{- end }}
{{- end -}}

{{- define "pdserve.cacheEnv" -}}
- name: PDSERVE_CACHE
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
- name: HOME
  value: /tmp
{{- if .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hubTokenSecret }}
      key: token
{{- end }}
{{- end -}}

{{- /* Flags of every service. */ -}}
{{- define "pdserve.commonArgs" -}}
- --host=0.0.0.0
- --port=50051
- --metrics-port=9090
- --model={{ .Values.model.name }}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
- --cluster={{ .Values.cluster }}
- --log-level={{ .Values.logLevel }}
- --drain-grace-s={{ .Values.drainGraceSeconds }}
{{- with .Values.otlpTracesEndpoint }}
- --otlp-traces-endpoint={{ . }}
{{- end }}
{{- if .Values.tls.secretName }}
- --tls-cert-file=/tls/tls.crt
- --tls-key-file=/tls/tls.key
- --tls-ca-file=/tls/ca.crt
- --tls-peer-name={{ .Values.tls.peerName }}
- --require-tls
{{- end }}
{{- end -}}

{{- /* Flags of every worker. */ -}}
{{- define "pdserve.workerArgs" -}}
{{- if .Values.tls.secretName }}
- --health-port=50052
{{- end }}
{{- with .Values.engine }}
- --device={{ .device }}
- --dtype={{ .dtype }}
- --page-size={{ .pageSize | int64 }}
- --kv-cache-memory-bytes={{ .kvCacheMemoryBytes | int64 }}
{{- with .maxModelLen }}
- --max-model-len={{ . | int64 }}
{{- end }}
{{- with .maxNumSeqs }}
- --max-num-seqs={{ . | int64 }}
{{- end }}
{{- with .maxNumBatchedTokens }}
- --max-num-batched-tokens={{ . | int64 }}
{{- end }}
{{- with .threads }}
- --threads={{ . | int64 }}
{{- end }}
{{- if not .enablePrefixCaching }}
- --no-enable-prefix-caching
{{- end }}
- --scheduling-policy={{ .schedulingPolicy }}
{{- with .stepTargetMs }}
- --step-target-ms={{ . }}
{{- end }}
{{- with .longPrefillTokenThreshold }}
- --long-prefill-token-threshold={{ . | int64 }}
{{- end }}
{{- with .maxLongPartialPrefills }}
- --max-long-partial-prefills={{ . | int64 }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Flags of workers that decode, which prefill workers refuse. */ -}}
{{- define "pdserve.decodeArgs" -}}
{{- with .Values.engine -}}
- --preemption-mode={{ .preemptionMode }}
- --swap-space-bytes={{ .swapSpaceBytes | int64 }}
- --batching={{ .batching }}
{{- with .tpotSloMs }}
- --tpot-slo-ms={{ . }}
{{- end }}
{{- with .batchSize }}
- --batch-size={{ . | int64 }}
{{- end }}
{{- if not (kindIs "invalid" .batchWindowMs) }}
- --batch-window-ms={{ .batchWindowMs }}
{{- end }}
{{- end }}
{{- end -}}

{{- /*
Pod template of one of our services.
(dict "root" $ "component" "prefill" "values" .Values.prefill "args" "- prefill\n..." "health" "pdserve.v1.Worker"
      "idEnv" "PDSERVE_WORKER_ID" "dataPort" true "preStopSeconds" 0 "claim" false)
*/ -}}
{{- define "pdserve.podTemplate" -}}
{{- $root := .root -}}
{{- $grace := add $root.Values.drainGraceSeconds $root.Values.kvLeaseSeconds .preStopSeconds 15 -}}
{{- /* the kubelet speaks no TLS */ -}}
{{- $plainHealth := and $root.Values.tls.secretName (eq .health "pdserve.v1.Worker") -}}
{{- $probePort := ternary 50052 50051 (not (not $plainHealth)) -}}
metadata:
  labels:
    {{- include "pdserve.labels" . | nindent 4 }}
  {{- with .values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "pdserve.serviceAccountName" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # preStop, drain, the leases of a last transfer, and a margin
  terminationGracePeriodSeconds: {{ $grace }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  initContainers:
    - name: fetch-model
      image: {{ include "pdserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [fetch-model, --model, {{ $root.Values.model.name | quote }}]
      env:
        {{- include "pdserve.cacheEnv" $root | nindent 8 }}
      securityContext:
        {{- include "pdserve.containerSecurity" $root | nindent 8 }}
      resources:
        requests: {cpu: 500m, memory: 1Gi}
        limits: {memory: 2Gi}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
  containers:
    - name: {{ .component }}
      image: {{ include "pdserve.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- .args | nindent 8 }}
        {{- with .values.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: {{ .idEnv }}
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: PDSERVE_ADVERTISE_ADDRESS
          value: $(POD_IP):50051
        {{- if .dataPort }}
        - name: PDSERVE_ADVERTISE_DATA_ADDRESS
          value: $(POD_IP):50061
        {{- end }}
        {{- include "pdserve.redisEnv" $root | nindent 8 }}
        {{- include "pdserve.cacheEnv" $root | nindent 8 }}
        {{- with .values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9090}
        {{- if .dataPort }}
        - {name: data, containerPort: 50061}
        {{- end }}
        {{- if $plainHealth }}
        - {name: health, containerPort: 50052}
        {{- end }}
      # loading a large model takes minutes: ten of them before liveness counts
      startupProbe:
        grpc: {port: {{ $probePort }}, service: ""}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 120
      livenessProbe:
        grpc: {port: {{ $probePort }}, service: ""}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        grpc: {port: {{ $probePort }}, service: {{ .health }}}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      {{- if .preStopSeconds }}
      # until endpoints forget this pod, it still accepts
      lifecycle:
        preStop:
          sleep:
            seconds: {{ .preStopSeconds }}
      {{- end }}
      securityContext:
        {{- include "pdserve.containerSecurity" $root | nindent 8 }}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        {{- if $root.Values.tls.secretName }}
        - {name: tls, mountPath: /tls, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if $root.Values.tls.secretName }}
    - name: tls
      secret:
        secretName: {{ $root.Values.tls.secretName }}
        defaultMode: 0440
    {{- end }}
    {{- if not .claim }}
    - name: cache
      emptyDir:
        sizeLimit: {{ .values.cache.size }}
    {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* StatefulSet and headless service of a worker role; arguments as pdserve.podTemplate. */ -}}
{{- define "pdserve.worker" -}}
{{- $root := .root -}}
{{- $name := printf "%s-%s" (include "pdserve.fullname" $root) .component -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "pdserve.labels" . | nindent 4 }}
spec:
  # routers and workers find each other through Redis; this service only gives the pods their names
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "pdserve.selector" . | nindent 4 }}
  ports:
    - name: grpc
      port: 50051
      targetPort: grpc
      {{- if not $root.Values.tls.secretName }}
      appProtocol: kubernetes.io/h2c
      {{- end }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "pdserve.labels" . | nindent 4 }}
spec:
  replicas: {{ .values.replicas }}
  serviceName: {{ $name }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "pdserve.selector" . | nindent 6 }}
  template:
    {{- include "pdserve.podTemplate" (merge (dict "claim" .values.cache.persistent) .) | nindent 4 }}
  {{- if .values.cache.persistent }}
  persistentVolumeClaimRetentionPolicy:
    whenDeleted: Delete
    whenScaled: Retain
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: cache
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .values.cache.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .values.cache.size }}
  {{- end }}
{{- include "pdserve.pdb" . }}
{{- end -}}

{{- define "pdserve.pdb" -}}
{{- if .values.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "pdserve.fullname" .root }}-{{ .component }}
  labels:
    {{- include "pdserve.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "pdserve.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- /* What no schema can say. */ -}}
{{- define "pdserve.validate" -}}
{{- if and (ne .Values.engine.batching "continuous") (ne .Values.decode.role "mixed") -}}
{{- fail (printf "engine.batching %s needs decode.role mixed: a sequence that is handed over must not wait for a batch" .Values.engine.batching) -}}
{{- end -}}
{{- if and (eq (int .Values.prefill.replicas) 0) (eq .Values.decode.role "decode") (not .Values.router.allowDecodePrefill) -}}
{{- fail "prefill.replicas is 0: set decode.role=mixed or router.allowDecodePrefill=true, or nobody computes prompts" -}}
{{- end -}}
{{- if and (not .Values.redis.enabled) (not .Values.redis.url) (not .Values.redis.existingSecret.name) -}}
{{- fail "redis.enabled is false: give redis.url or redis.existingSecret.name" -}}
{{- end -}}
{{- if and .Values.redis.enabled (or .Values.redis.url .Values.redis.existingSecret.name) -}}
{{- fail "redis.url and redis.existingSecret name a Redis outside the chart: set redis.enabled=false with them" -}}
{{- end -}}
{{- end -}}
